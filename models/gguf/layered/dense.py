"""Dense models: Command R, StableLM 2 and Nemotron with LayerNorm; Arcee; DeciLM, whose layers have different sizes."""

from dataclasses import replace

from headrace.models.gguf.layered.common import (
    NORMS,
    attention,
    base_config,
    biases,
    feed_forward,
    layers_of,
    mlp,
    permuted_heads,
    require_whole_heads,
    rotated_share,
    scaled_rope,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Orders, Part, Parts, tables
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.models.gguf.target import interleaved
from headrace.runtime.errors import CheckpointError, UnsupportedModelError


def _command_r(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "cohere", layer_norm="layer_norm_eps")
    require_whole_heads(config)
    return config | {
        "intermediate_size": feed_forward(metadata), "logit_scale": metadata.number("{arch}.logit_scale", 0.0) or 1.0,
        "attention_bias": False, "layer_norm_bias": False, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }  # fmt: skip


COMMAND_R = LayeredArchitecture(
    "CohereForCausalLM", _command_r,
    {
        "layer": {
            "attn_norm": Part("input_layernorm", "hidden"), **attention(), **mlp(),
            "attn_q_norm": Part("self_attn.q_norm", "heads head", plain=True, optional=True),
            "attn_k_norm": Part("self_attn.k_norm", "kv_heads head", plain=True, optional=True),
        },
    },
    {key: part for key, part in tables().items() if key != "output"},  # its scores come from the embedding table
)  # fmt: skip


def _stablelm(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "stablelm", layer_norm="layer_norm_eps")
    require_whole_heads(config)
    if config["tie_word_embeddings"] or "blk.0.attn_q_norm.weight" in file.shapes:
        raise UnsupportedModelError("a StableLM with tied embeddings or norms of heads is not supported")
    return config | rotated_share(metadata, config) | {
        "intermediate_size": feed_forward(metadata), "use_qkv_bias": "blk.0.attn_q.bias" in file.shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.shapes, "qk_layernorm": False,
    }  # fmt: skip


_NORM_BIASES = {"output_norm.bias": Part("model.norm", "hidden", "bias")}
STABLELM = LayeredArchitecture(
    "StableLmForCausalLM", _stablelm,
    {
        "layer": {
            **biases({"attn_norm": NORMS["attn_norm"]}), **mlp(),
            **biases(attention(), "attn_q", "attn_k", "attn_v", optional=True),
            **biases({"ffn_norm": replace(NORMS["ffn_norm"], optional=True)}, optional=True),
        },
    },
    tables() | _NORM_BIASES,
)  # fmt: skip


def _nemotron(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "nemotron", layer_norm="norm_eps")
    scaling = scaled_rope(metadata, config, config["head_dim"])["rope_scaling"]
    if scaling is not None:
        if scaling["rope_type"] != "linear":
            raise UnsupportedModelError(f"a Nemotron with {scaling['rope_type']} RoPE scaling is not supported")
        config["rope_scaling"] = scaling | {"type": "linear"}
    return config | rotated_share(metadata, config) | {
        "intermediate_size": feed_forward(metadata), "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _plus_one(part: Part, key: str) -> dict[str, Part]:
    """Return a norm whose weights the converter has added 1 to, and its bias."""
    return {key: replace(part, values="minus_one"), f"{key}.bias": replace(part, leaf="bias")}


NEMOTRON = LayeredArchitecture(
    "NemotronForCausalLM", _nemotron,
    {
        "layer": {
            **_plus_one(NORMS["attn_norm"], "attn_norm"), **_plus_one(NORMS["ffn_norm"], "ffn_norm"), **attention(),
            "ffn_up": Part("mlp.up_proj", "inner hidden"), "ffn_down": Part("mlp.down_proj", "hidden inner"),
        },
    },
    tables() | _plus_one(tables()["output_norm"], "output_norm"),
)  # fmt: skip


def _arcee(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "arcee")
    return config | scaled_rope(metadata, config, config["head_dim"], file.rope_factors) | {
        "intermediate_size": feed_forward(metadata), "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


ARCEE = LayeredArchitecture(
    "ArceeForCausalLM", _arcee,
    {
        "layer": {
            **NORMS, **attention(permuted=True), "ffn_up": Part("mlp.up_proj", "inner hidden"),
            "ffn_down": Part("mlp.down_proj", "hidden inner"),
        },
    },
    tables(), orders=permuted_heads, rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip


_FFN_STEP = 256
"""The class rounds feed-forward widths up to a multiple of it."""


def _deci(metadata: Metadata, file: Contents) -> Config:
    """Return the config of layers with or without attention, or with one matrix in its place."""
    config = base_config(metadata, file, "nemotron-nas")
    require_whole_heads(config)
    count = layers_of(metadata)
    heads = config["num_attention_heads"]
    queries = metadata.per_layer("{arch}.attention.head_count", count)
    keys = metadata.per_layer("{arch}.attention.head_count_kv", count, heads)
    inner = metadata.per_layer("{arch}.feed_forward_length", count, maximum=1 << 22)
    return config | scaled_rope(metadata, config, config["head_dim"], file.rope_factors) | {
        "attention_bias": False, "mlp_bias": False,
        "block_configs": [
            {
                "attention": _deci_attention(heads, layer_heads, kv_heads, width),
                "ffn": _deci_feed_forward(width, config["hidden_size"]),
            }
            for layer_heads, kv_heads, width in zip(queries, keys, inner, strict=True)
        ],
    }  # fmt: skip


def _deci_attention(heads: int, queries: int, keys: int, inner: int) -> Config:
    if queries not in (0, heads) or (queries and not inner):  # llama.cpp drops attention without a feed-forward
        raise UnsupportedModelError(f"a layer of DeciLM with {queries} heads and width {inner} is not supported")
    if keys and heads % keys:
        raise CheckpointError(f"{heads} attention heads cannot share {keys} key/value heads")
    return {
        "no_op": queries == 0,
        "replace_with_linear": queries > 0 and keys == 0,
        "n_heads_in_group": heads // keys if queries and keys else None,
    }


def _deci_feed_forward(inner: int, hidden: int) -> Config:
    if inner % _FFN_STEP:
        raise UnsupportedModelError(f"a DeciLM with feed-forwards of {inner} is not supported")
    # The class takes two thirds of this multiple of the model's width, rounded up: half a step less is safe.
    multiple = 1.5 * (inner - _FFN_STEP // 2) / hidden
    return {"no_op": inner == 0, "replace_with_linear": False, "ffn_mult": multiple if inner else None}


def _deci_kinds(config: Config) -> list[tuple[str, ...]]:
    found = []
    for block in config["block_configs"]:
        attends = block["attention"]
        feeds = block["ffn"]
        inner = round(feeds["ffn_mult"] * config["hidden_size"] / 1.5) + _FFN_STEP // 2 if feeds["ffn_mult"] else 0
        group = attends["n_heads_in_group"]
        first = f"attention {config['num_attention_heads'] // group}" if group else "linear"
        found.append((*(() if attends["no_op"] else (first,)), *((f"mlp {inner}",) if inner else ())))
    return found


class _DeciGroups(dict[str, Parts]):
    """Tensors of a layer's half by its kind and size: "attention 8" has so many K/V heads, "mlp 256" such a width."""

    def __missing__(self, kind: str) -> Parts:
        name, _, size = kind.partition(" ")
        if name == "mlp":
            return {"ffn_norm": NORMS["ffn_norm"], **mlp(inner=size)}
        projections = attention(permuted=True)
        for key, rows in (("attn_k", f"keys {size}"), ("attn_v", "")):
            projections[key] = replace(projections[key], shape=f"{size}*head hidden", rows=rows)
        return {"attn_norm": NORMS["attn_norm"], **projections}


def _deci_orders(config: Config) -> Orders:
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"]
    groups = {block["attention"]["n_heads_in_group"] for block in config["block_configs"]} - {None}
    counts = {"queries": heads} | {f"keys {heads // group}": heads // group for group in groups}
    return {name: interleaved(count, count * head_dim) for name, count in counts.items()}


DECI = LayeredArchitecture(
    "DeciLMForCausalLM", _deci,
    _DeciGroups(
        linear={"attn_norm": NORMS["attn_norm"], "attn_output": Part("self_attn.linear", "hidden hidden")}
    ),
    tables(), kinds=_deci_kinds, orders=_deci_orders, rope_tensors=(ROPE_FACTORS,),
)  # fmt: skip
