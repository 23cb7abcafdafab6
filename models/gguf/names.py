"""GGUF tensor names -> Hugging Face names, with the shape each must have and what its layout still needs.

Two layouts differ from Hugging Face's: llama.cpp's converter permutes the Q and K rows of llama-family models for
interleaved RoPE, and stores Gemma's norm weights with the 1 already added.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.runtime.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the config

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION, _MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Target:
    """Where a tensor goes. `permuted_heads` > 0: its rows are interleaved per head; `plus_one`: subtract 1."""

    source: str
    module: str  # path without .weight / .bias
    leaf: str
    shape: tuple[int, ...]
    permuted_heads: int = 0
    plus_one: bool = False


def targets(architecture: str, config: dict[str, Any], present: Iterable[str]) -> list[Target]:
    """One `Target` for every tensor but the RoPE factors, in model order.

    Raises `CheckpointError` for a tensor that is missing, `UnsupportedModelError` for one nobody asked for.
    """
    wanted = list(_expected(architecture, config))
    left = set(present) - {ROPE_FACTORS}
    for target in wanted:
        if target.source not in left:
            raise CheckpointError(f"tensor {target.source} is missing")
        left.discard(target.source)
    if left:
        raise UnsupportedModelError(f"tensor {min(left)} has no place in a {architecture} model")
    return wanted


def _expected(architecture: str, config: dict[str, Any]) -> Iterable[Target]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    gemma = architecture.startswith("gemma")
    yield Target("token_embd.weight", "model.embed_tokens", "weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(architecture, config, layer)
    yield Target("output_norm.weight", "model.norm", "weight", (hidden,), plus_one=gemma)
    if not config["tie_word_embeddings"]:
        if architecture in ("gemma", "gemma2"):
            raise UnsupportedModelError("tensor output.weight: untied Gemma models are not supported")
        yield Target("output.weight", "lm_head", "weight", (vocab, hidden))


def _layer(architecture: str, config: dict[str, Any], layer: int) -> Iterable[Target]:
    gemma, permuted = architecture.startswith("gemma"), architecture == "llama"
    modules = dict(_MODULES)
    if architecture in ("gemma2", "gemma3"):
        modules |= _SANDWICH_NORMS
    if architecture not in ("qwen3", "gemma3"):
        del modules["attn_q_norm"], modules["attn_k_norm"]
    biased = _biased(architecture, config)
    shapes = _shapes(config)
    for source, module in modules.items():
        path = f"model.layers.{layer}.{module}"
        heads = 0
        if permuted and source in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if source == "attn_q" else "num_key_value_heads"]
        plus_one = gemma and source.endswith("norm")
        yield Target(f"blk.{layer}.{source}.weight", path, "weight", shapes[source], heads, plus_one)
        if source in biased:
            yield Target(f"blk.{layer}.{source}.bias", path, "bias", shapes[source][:1], heads)


def _biased(architecture: str, config: dict[str, Any]) -> tuple[str, ...]:
    if architecture == "qwen2":
        return _ATTENTION[:3]
    return (_ATTENTION if config["attention_bias"] else ()) + (_MLP if config.get("mlp_bias") else ())


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """(rows, columns) of each matrix, (length,) of each norm."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        **dict.fromkeys(norms, (hidden,)),
    }
