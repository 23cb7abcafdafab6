"""Layers of different sizes, which the file lists: OpenELM and DeciLM (Nemotron NAS).

DeciLM's are with or without attention, or with one matrix in its place. mlx-lm's class (`nemotron-nas`) reads the sizes
from `block_configs` in config.json, with an entry for attention and one for the feed-forward of each layer. A GGUF has
lists of numbers instead.

Guard: tests/models/gguf/test_layered.py, with a variant of each kind.
"""

from functools import partial

from msgspec.structs import replace

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule, TensorRules
from headrace.models.gguf.architectures.blocks import NORMS, attention, head_norms, mlp, tables
from headrace.models.gguf.keys import HEADS, WIDTH, layers_of
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Order, interleaved
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_FFN_STEP = 256
"""DeciLM's class rounds feed-forward widths up to a multiple of it."""


def _deci_entries(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of each layer, as entries of the config."""
    count = layers_of(metadata)
    heads = config["num_attention_heads"]
    heads_by_layer = metadata.per_layer("{arch}.attention.head_count", count)
    kv_heads_by_layer = metadata.per_layer("{arch}.attention.head_count_kv", count, heads)
    width_by_layer = metadata.per_layer("{arch}.feed_forward_length", count, maximum=WIDTH)
    return {
        "block_configs": [
            {
                "attention": _attention(heads, layer_heads, kv_heads, width),
                "ffn": _feed_forward(width, config["hidden_size"]),
            }
            for layer_heads, kv_heads, width in zip(heads_by_layer, kv_heads_by_layer, width_by_layer, strict=True)
        ],
    }


def _attention(heads: int, layer_heads: int, kv_heads: int, width: int) -> Entries:
    """Return the entry for a layer's attention.

    heads: of the model's attention.
    layer_heads: the same, or 0 for a layer without attention.
    kv_heads: K/V heads of the layer; 0: one matrix in place of attention.
    width: of the layer's feed-forward; 0: it has none.
    """
    is_dropped = layer_heads > 0 and width == 0  # llama.cpp drops attention without a feed-forward
    if is_dropped or layer_heads not in (0, heads):
        raise UnsupportedModelError(f"a layer of DeciLM with {layer_heads} heads and width {width} is not supported")
    if kv_heads and heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    heads_per_group = None
    if layer_heads and kv_heads:
        heads_per_group = heads // kv_heads
    return {
        "no_op": layer_heads == 0,
        "replace_with_linear": layer_heads > 0 and kv_heads == 0,
        "n_heads_in_group": heads_per_group,
    }


def _feed_forward(width: int, hidden_size: int) -> Entries:
    """Return the entry for a layer's feed-forward. width: 0 if the layer has none."""
    if width % _FFN_STEP:
        raise UnsupportedModelError(f"a DeciLM with feed-forwards of {width} is not supported")
    multiple = _multiple(width, hidden_size) if width else None
    return {"no_op": width == 0, "replace_with_linear": False, "ffn_mult": multiple}


def _multiple(width: int, hidden_size: int) -> float:
    """Return the multiple of the model's width from which the class computes that of a feed-forward, `ffn_mult`.

    The class takes two thirds of the product, and rounds up to a step. So half a step less leads to the same width,
    and is safe from errors of floats. A multiple of exactly this width might be rounded up to the next step.
    """
    return 1.5 * (width - _FFN_STEP // 2) / hidden_size


def _width(multiple: float, hidden_size: int) -> int:
    """Return the width of a feed-forward; the inverse of `_multiple`."""
    return round(multiple * hidden_size / 1.5) + _FFN_STEP // 2


def _deci_layers(config: Config) -> list[TensorRules]:
    """Return the tensors of each layer."""
    layers: list[TensorRules] = []
    for block in config["block_configs"]:
        parts: dict[str, TensorRule] = {}
        heads_per_group = block["attention"]["n_heads_in_group"]
        if heads_per_group:
            parts |= _attention_tensors(config["num_attention_heads"] // heads_per_group)
        elif block["attention"]["replace_with_linear"]:
            parts |= _LINEAR
        multiple = block["ffn"]["ffn_mult"]
        if multiple:
            width = _width(multiple, config["hidden_size"])
            parts |= {"ffn_norm": NORMS["ffn_norm"], **mlp(inner=str(width))}
        layers.append(parts)
    return layers


# One matrix in place of attention
_LINEAR = {"attn_norm": NORMS["attn_norm"], "attn_output": TensorRule("self_attn.linear", "hidden hidden")}


def _attention_tensors(kv_heads: int) -> dict[str, TensorRule]:
    """Return the tensors of a layer's attention."""
    projections = attention(permuted=True)
    shape = f"{kv_heads}*head hidden"
    keys = replace(projections["attn_k"], shape=shape, rows=partial(_permuted_keys, kv_heads))
    values = replace(projections["attn_v"], shape=shape)
    return {"attn_norm": NORMS["attn_norm"], **projections, "attn_k": keys, "attn_v": values}


def _permuted_keys(kv_heads: int, config: Config) -> Order:
    """Return the rows of a layer's keys in Hugging Face order."""
    return interleaved(kv_heads, config["head_dim"])


def _openelm_entries(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes of each layer, under the names of the family's config."""
    count = layers_of(metadata)
    widths = metadata.per_layer("{arch}.feed_forward_length", count, minimum=1, maximum=WIDTH)
    return {
        "model_dim": config["hidden_size"], "num_transformer_layers": count,
        "max_context_length": config["max_position_embeddings"], "rope_freq_constant": config["rope_theta"],
        "num_query_heads": metadata.per_layer("{arch}.attention.head_count", count, minimum=1, maximum=HEADS),
        "num_kv_heads": metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=HEADS),
        "ffn_multipliers": [width / config["hidden_size"] for width in widths], "ffn_dim_divisor": 1,
        "share_input_output_layers": config["tie_word_embeddings"],
    }  # fmt: skip


def _openelm_layers(config: Config) -> list[TensorRules]:
    """Return the tensors of each layer."""
    widths = [round(multiple * config["hidden_size"]) for multiple in config["ffn_multipliers"]]
    sizes = zip(config["num_query_heads"], config["num_kv_heads"], widths, strict=True)
    return [
        {
            "attn_norm": TensorRule("attn_norm", "hidden"), "ffn_norm": TensorRule("ffn_norm", "hidden"),
            "attn_qkv": TensorRule("attn.qkv_proj", f"{heads + 2 * kv_heads}*head hidden"),
            "attn_output": TensorRule("attn.out_proj", f"hidden {heads}*head"),
            **head_norms("attn.q_norm", "attn.k_norm"), **mlp("ffn", inner=str(width)),
        }
        for heads, kv_heads, width in sizes
    ]  # fmt: skip


ROWS = {
    "deci": GGUFArchitecture(
        model_class="DeciLMForCausalLM",
        model_type="nemotron-nas",
        groups={},
        tables=tables(),
        keys=(),
        entries=_deci_entries,
        constants={"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
        head_counts=True,
        scales_rope=True,
        whole_heads=True,
        layers=_deci_layers,
    ),
    "openelm": GGUFArchitecture(
        model_class="OpenELMForCausalLM",
        model_type="openelm",
        groups={},
        tables=tables("transformer.norm", "transformer.token_embeddings"),
        keys=(),
        constants={"normalize_qk_projections": True, "ffn_with_glu": True},
        entries=_openelm_entries,
        head_counts=True,
        layer="transformer.layers.{}",
        layers=_openelm_layers,
    ),
}
