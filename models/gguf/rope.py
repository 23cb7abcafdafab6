"""RoPE scaling: GGUF metadata and the `rope_freqs.weight` tensor -> a Hugging Face `rope_scaling` entry."""

import math
from typing import Any

from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Every Llama 3.1 to 3.3 model uses these three; only the factor differs (8 or 32).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling(metadata: Metadata, head_dim: int, theta: float, factors: list[float] | None) -> dict[str, Any] | None:
    """The `rope_scaling` entry, or None for plain RoPE. `UnsupportedModelError` for a kind headrace does not run."""
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    if factors is not None and any(factor != 1 for factor in factors):
        if kind != "none":
            raise UnsupportedModelError(f"RoPE scaling {kind!r} together with rope_freqs.weight is not supported")
        return _llama3(head_dim, theta, factors)
    if kind == "none":
        return None
    factor = metadata.positive("{arch}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.integer(
                "{arch}.rope.scaling.original_context_length", least=1
            ),
            "beta_fast": metadata.positive("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.positive("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported")


def _llama3(head_dim: int, theta: float, factors: list[float]) -> dict[str, Any]:
    """Recover the Llama 3 parameters from the per-frequency factors, and check that they reproduce them."""
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} factors for heads of size {head_dim}")
    factor = round(factors[-1], 4)  # the lowest frequency is scaled in full
    config: dict[str, Any] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if factor <= 1 or theta <= 1:
        raise UnsupportedModelError("rope_freqs.weight does not follow the Llama 3 formula")
    for index, given in enumerate(factors):
        expected = llama3_factor(2 * math.pi * theta ** (2 * index / head_dim), config)
        if abs(given - expected) > 1e-3 * expected:
            raise UnsupportedModelError("rope_freqs.weight does not follow the Llama 3 formula")
    return config


def llama3_factor(wavelength: float, config: dict[str, Any]) -> float:
    """What Llama 3 divides the frequency of this wavelength by (transformers, `_compute_llama3_parameters`)."""
    context, low, high = (
        config["original_max_position_embeddings"], config["low_freq_factor"], config["high_freq_factor"],
    )  # fmt: skip
    turns = context / wavelength
    if turns >= high:
        return 1.0
    if turns <= low:
        return float(config["factor"])
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / config["factor"] + smooth))
