"""Hugging Face names of GGUF tensors, with their required shapes and layout changes.

Two layouts differ: llama.cpp's converter permutes the Q and K rows of llama-family models for interleaved RoPE, and
adds 1 to Gemma's norm weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.models.architectures.read import biased_modules
from headrace.models.gguf.architectures import Architecture, find
from headrace.models.gguf.layered import LAYERED
from headrace.models.gguf.layered.common import bias_of, permuted_heads
from headrace.models.gguf.layered.parts import target_of
from headrace.models.gguf.layered.sizes import sizes_of
from headrace.models.gguf.rope import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from headrace.models.gguf.target import Target, Values, unfused
from headrace.runtime.errors import CheckpointError, UnsupportedModelError


def targets(architecture: str, config: dict[str, Any], present: Mapping[str, tuple[int, ...]]) -> list[Target]:
    """Return one `Target` for every tensor except RoPE factors and unused layers, in model order.

    present: shapes of the file's tensors. Raises CheckpointError for a missing tensor, UnsupportedModelError for an
    unknown one.
    """
    layered = LAYERED.get(architecture)
    wanted = list(_expected(architecture, config, present) if layered is None else layered.targets(config, present))
    used = {source for target in wanted for source in target.sources}
    for source in used - present.keys():
        raise CheckpointError(f"tensor {source} is missing")
    in_config = (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT) if layered is None else layered.rope_tensors
    unused = set(present) - used - set(in_config)
    unused = unused if layered is None else {name for name in unused if not layered.ignores(name, config)}
    if unused:
        raise UnsupportedModelError(f"tensor {min(unused)} has no place in a {architecture} model")
    return wanted


def _expected(name: str, config: dict[str, Any], present: Mapping[str, tuple[int, ...]]) -> Iterable[Target]:
    hidden = config["hidden_size"]
    vocab = config["vocab_size"]
    architecture = find(name, experts=sizes_of(config)["experts"])
    assert architecture is not None
    yield Target("token_embd.weight", "model.embed_tokens", "weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        yield from unfused(dict(_layer(architecture, config, layer)), present)
    values: Values = "minus_one" if architecture.gemma else "same"
    yield Target("output_norm.weight", "model.norm", "weight", (hidden,), values=values)
    if not config["tie_word_embeddings"]:
        if name in ("gemma", "gemma2"):
            raise UnsupportedModelError("tensor output.weight: untied Gemma models are not supported")
        yield Target("output.weight", "lm_head", "weight", (vocab, hidden))


def _layer(architecture: Architecture, config: dict[str, Any], layer: int) -> Iterable[tuple[str, Target]]:
    biased = biased_modules(config)
    sizes = sizes_of(config)
    orders = permuted_heads(config) if any(part.rows for part in architecture.parts.values()) else {}
    for key, part in architecture.parts.items():
        source = f"blk.{layer}.{key}"
        yield f"{key}.weight", target_of(part, f"{source}.weight", f"model.layers.{layer}.", sizes, orders)
        if key in architecture.biased or part.module in biased:
            bias = bias_of(part)
            yield f"{key}.bias", target_of(bias, f"{source}.bias", f"model.layers.{layer}.", sizes, orders)
