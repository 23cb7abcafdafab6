"""Hugging Face names of GGUF tensors, with their required shapes and layout changes.

Two layouts differ: llama.cpp's converter permutes the Q and K rows of llama-family models for interleaved RoPE, and
adds 1 to Gemma's norm weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.models.gguf.architectures import Architecture, find
from headrace.models.gguf.layered import LAYERED
from headrace.models.gguf.rope import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from headrace.models.gguf.target import Target, Values, interleaved, unfused
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_ATTENTION, _MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")


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
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    architecture = find(name, experts=experts_of(config))
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
    attention = _ATTENTION[:3] if config["model_type"] == "glm4" else _ATTENTION
    stated = (attention if config.get("attention_bias") else ()) + (_MLP if config.get("mlp_bias") else ())
    biased = architecture.biased or stated
    shapes = _shapes(architecture, config)
    for source, module in architecture.modules.items():
        path, at, rows = f"model.layers.{layer}.{module}", f"blk.{layer}.{source}", None
        if architecture.permuted and source in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if source == "attn_q" else "num_key_value_heads"]
            rows = interleaved(heads, shapes[source][0])
        leaf = "sinks" if source == "attn_sinks" else "weight"
        values: Values = "minus_one" if architecture.gemma and source.endswith("norm") else "same"
        stored = (1, *shapes[source]) if source == "ffn_gate_inp_shexp" else None
        weight = Target(f"{at}.weight", path, leaf, shapes[source], rows, values=values, stored=stored)
        yield f"{source}.weight", weight
        if source in biased:
            yield f"{source}.bias", Target(f"{at}.bias", path, "bias", shapes[source][:-1], rows)


def experts_of(config: dict[str, Any]) -> int:
    """Return a config's number of experts, under any family's key."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _shapes(architecture: Architecture, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return (rows, columns) of each matrix, with experts stacked, and (length,) of each vector."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    count, width = experts_of(config), config.get("moe_intermediate_size", inner)
    shared = config.get("shared_expert_intermediate_size", 0)
    wide = architecture.wide_head_norms
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "attn_sinks": (config["num_attention_heads"],),
        "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if architecture.fused_up else inner, hidden),
        "ffn_down": (hidden, inner),
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, width, hidden),
        "ffn_up_exps": (count, width, hidden),
        "ffn_down_exps": (count, hidden, width),
        "ffn_gate_inp_shexp": (hidden,),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
        "attn_q_norm": (queries if wide else head,),
        "attn_k_norm": (keys if wide else head,),
        **dict.fromkeys(norms, (hidden,)),
    }
