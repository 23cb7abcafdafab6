"""Hugging Face `rope_scaling` entries from GGUF metadata and the `rope_freqs.weight` tensor.

`config` calls `rope_scaling` or `long_rope`; `models.network.rope` computes what they say.

Guard: tests/models/gguf/test_config.py.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
# Llama 3's numbers are equal in all models; the factor differs (8 or 32 in Llama), and rarely the original context.
_LOW = 1.0
_HIGH = 4.0
_LLAMA3_CONTEXT = 8192  # tokens, the usual original context
_TOLERANCE = 1e-3  # deviation from a formula: files have numbers in float32, and some converters round them


class LongFactors(NamedTuple):
    """Frequency divisors beyond and within the original training context."""

    long: list[float]
    short: list[float]


def rope_scaling(
    metadata: Metadata, rotated: int, theta: float, factors: list[float] | None
) -> dict[str, object] | None:
    """Return the `rope_scaling` entry, or None for plain RoPE. Raises UnsupportedModelError for an unknown kind.

    rotated: rotated part of a head. factors: content of `rope_freqs.weight`.
    """
    kind = metadata.text("{arch}.rope.scaling.type", "linear")  # llama.cpp's default
    factor = _stretch(metadata)
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported")
    if factors is not None and any(factor != 1 for factor in factors):
        if is_scaled:
            raise UnsupportedModelError(f"RoPE scaling {kind!r} together with rope_freqs.weight is not supported")
        return _llama3(rotated, theta, factors)
    if not is_scaled:
        return None
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(metadata, factor)


def _stretch(metadata: Metadata) -> float:
    """Return by how much positions are divided. llama.cpp reads the old key if the new one is missing, and 0 as 1."""
    new = "{arch}.rope.scaling.factor"
    old = "{arch}.rope.scale_linear"
    metadata.ignore(new, old)
    return metadata.number(new if metadata.has(new) else old, 1.0) or 1.0


def _yarn(metadata: Metadata, factor: float) -> dict[str, object]:
    """Return YaRN's entry. Raises UnsupportedModelError for another amplitude than llama.cpp computes."""
    section: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(
            "{arch}.rope.scaling.original_context_length", metadata.integer("{arch}.context_length"), minimum=1
        ),
        "beta_fast": metadata.positive("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.positive("{arch}.rope.scaling.yarn_beta_slow", 1.0),
    }
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    # The first key multiplies YaRN's own amplitude, the second replaces it. Some programs read the second for few
    # architectures or not at all, so only a value that changes nothing is accepted.
    amplitude = usual * metadata.positive("{arch}.rope.scaling.attn_factor", 1.0)
    stated = metadata.positive("{arch}.rope.scaling.yarn_attn_factor", usual)
    if abs(stated - usual) > _TOLERANCE * usual:
        raise UnsupportedModelError(f"YaRN with rope.scaling.yarn_attn_factor {stated:g} is not supported")
    return section if amplitude == usual else {**section, "attention_factor": amplitude}


def long_rope(metadata: Metadata, context: int, rotated: int, factors: LongFactors) -> dict[str, object]:
    """Return the config entries of LongRoPE (Ding et al., arXiv:2402.13753). rotated: rotated part of a head.

    Raises UnsupportedModelError unless the amplitude follows from the two contexts.
    """
    for each in (factors.long, factors.short):
        if len(each) != rotated // 2:
            raise CheckpointError(f"a rope_factors tensor has {len(each)} factors for heads that turn {rotated}")
    # The two tensors make it LongRoPE, whatever the type. Some files state "linear", which is llama.cpp's default, or
    # "none". A linear factor other than 1 is not read here, so `config.refuse_unread` refuses it.
    if (kind := metadata.text("{arch}.rope.scaling.type", "longrope")) not in ("longrope", "linear", "none"):
        raise UnsupportedModelError(f"LongRoPE together with RoPE scaling {kind!r} is not supported")
    original = metadata.integer("{arch}.rope.scaling.original_context_length", context, minimum=2)
    scale = context / original
    amplitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if abs(metadata.positive("{arch}.rope.scaling.attn_factor", amplitude) - amplitude) > _TOLERANCE:
        raise UnsupportedModelError("LongRoPE with an attention factor of its own is not supported")
    scaling = {"type": "longrope", "rope_type": "longrope", "long_factor": factors.long, "short_factor": factors.short}
    return {"original_max_position_embeddings": original, "rope_scaling": scaling}


def _llama3(head_dim: int, theta: float, factors: list[float]) -> dict[str, object]:
    """Recover the Llama 3 parameters from the per-frequency factors, and verify that they reproduce them."""
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} factors for heads of size {head_dim}")
    factor = round(factors[-1], 4)  # the lowest frequency has the full factor
    if factor <= 1 or theta <= 1:
        raise UnsupportedModelError("rope_freqs.weight does not follow the Llama 3 formula")
    high, context = _trained_range(head_dim, theta, factors, factor)
    config: dict[str, Any] = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    for index, given in enumerate(factors):
        expected = llama3_factor(2 * math.pi * theta ** (2 * index / head_dim), config)
        if abs(given - expected) > _TOLERANCE * expected:
            raise UnsupportedModelError("rope_freqs.weight does not follow the Llama 3 formula")
    return config


def _trained_range(head_dim: int, theta: float, factors: list[float], factor: float) -> tuple[float, int]:
    """Return (high_freq_factor, original context), which follow from the factors between 1 and the full one.

    Between them, a linear function of the frequency weighs the two, with low = low_freq_factor:

        smooth = (context * frequency - low) / (high - low)
               = slope * frequency - below,   slope = context / (high - low),   below = low / (high - low)

    One such factor gives the context for the usual `high`. Two give slope and below, and those give both:
    high = low + low / below, context = slope * low / below.
    """
    points = []  # (turns for each position, weight of the unscaled frequency)
    for index, given in enumerate(factors):
        if 1 + _TOLERANCE < given < (1 - _TOLERANCE) * factor:
            smooth = (1 / given - 1 / factor) / (1 - 1 / factor)
            points.append((1 / (2 * math.pi * float(theta ** (2 * index / head_dim))), smooth))
    if not points:
        return _HIGH, _LLAMA3_CONTEXT
    (frequency, smooth), (other, other_smooth) = points[0], points[-1]
    if frequency == other:
        return _HIGH, round((smooth * (_HIGH - _LOW) + _LOW) / frequency)
    slope = (smooth - other_smooth) / (frequency - other)
    below = slope * frequency - smooth  # low / (high - low)
    if slope <= 0 or below <= 0:
        raise UnsupportedModelError("rope_freqs.weight does not follow the Llama 3 formula")
    return round(_LOW + _LOW / below, 2), round(slope * _LOW / below)


def llama3_factor(wavelength: float, config: Mapping[str, float]) -> float:
    """Return Llama 3's frequency divisor for this wavelength (transformers, `_compute_llama3_parameters`)."""
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
