"""DeciLM (Nemotron NAS): layers of different sizes, with or without attention, or with one matrix in its place."""

from dataclasses import replace
from functools import partial

from headrace.models.gguf.architecture import Architecture, Config, Contents, Entries, Part, Parts
from headrace.models.gguf.architectures.blocks import NORMS, attention, mlp, tables
from headrace.models.gguf.keys import WIDTH, layers_of
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.models.gguf.target import Order, interleaved
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_FFN_STEP = 256
"""The class rounds feed-forward widths up to a multiple of it."""


def _deci(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of each layer."""
    count = layers_of(metadata)
    heads = config["num_attention_heads"]
    queries = metadata.per_layer("{arch}.attention.head_count", count)
    keys = metadata.per_layer("{arch}.attention.head_count_kv", count, heads)
    inner = metadata.per_layer("{arch}.feed_forward_length", count, maximum=WIDTH)
    return {
        "block_configs": [
            {
                "attention": _attention(heads, layer_heads, kv_heads, width),
                "ffn": _feed_forward(width, config["hidden_size"]),
            }
            for layer_heads, kv_heads, width in zip(queries, keys, inner, strict=True)
        ],
    }


def _attention(heads: int, queries: int, keys: int, inner: int) -> Entries:
    if queries not in (0, heads) or (queries and not inner):  # llama.cpp drops attention without a feed-forward
        raise UnsupportedModelError(f"a layer of DeciLM with {queries} heads and width {inner} is not supported")
    if keys and heads % keys:
        raise CheckpointError(f"{heads} attention heads cannot share {keys} key/value heads")
    return {
        "no_op": queries == 0,
        "replace_with_linear": queries > 0 and keys == 0,
        "n_heads_in_group": heads // keys if queries and keys else None,
    }


def _feed_forward(inner: int, hidden: int) -> Entries:
    if inner % _FFN_STEP:
        raise UnsupportedModelError(f"a DeciLM with feed-forwards of {inner} is not supported")
    # The class takes two thirds of this multiple of the model's width, rounded up: half a step less is safe.
    multiple = 1.5 * (inner - _FFN_STEP // 2) / hidden
    return {"no_op": inner == 0, "replace_with_linear": False, "ffn_mult": multiple if inner else None}


def _kinds(config: Config) -> list[tuple[str, ...]]:
    kinds = []
    for block in config["block_configs"]:
        attends = block["attention"]
        feeds = block["ffn"]
        inner = round(feeds["ffn_mult"] * config["hidden_size"] / 1.5) + _FFN_STEP // 2 if feeds["ffn_mult"] else 0
        group = attends["n_heads_in_group"]
        first = f"attention {config['num_attention_heads'] // group}" if group else "linear"
        kinds.append((*(() if attends["no_op"] else (first,)), *((f"mlp {inner}",) if inner else ())))
    return kinds


class _Groups(dict[str, Parts]):
    """Tensors of a layer's half by its kind and size: "attention 8" has so many K/V heads, "mlp 256" such a width."""

    def __missing__(self, kind: str) -> Parts:
        name, _, size = kind.partition(" ")
        if name == "mlp":
            return {"ffn_norm": NORMS["ffn_norm"], **mlp(inner=size)}
        projections = attention(permuted=True)
        shape = f"{size}*head hidden"
        keys = replace(projections["attn_k"], shape=shape, rows=partial(_permuted_keys, int(size)))
        values = replace(projections["attn_v"], shape=shape)
        return {"attn_norm": NORMS["attn_norm"], **projections, "attn_k": keys, "attn_v": values}


def _permuted_keys(kv_heads: int, config: Config) -> Order:
    return interleaved(kv_heads, config["head_dim"])


_LINEAR = {"attn_norm": NORMS["attn_norm"], "attn_output": Part("self_attn.linear", "hidden hidden")}
ROWS = {
    "deci": Architecture(
        "DeciLMForCausalLM", "nemotron-nas", _Groups(linear=_LINEAR), tables(), keys=(), entries=_deci,
        constants={"attention_bias": False, "mlp_bias": False, "rope_scaling": None}, head_counts=True,
        scales_rope=True, config_tensors=(ROPE_FACTORS,), whole_heads=True, kinds=_kinds,
    ),
}  # fmt: skip
