"""Dense models with LayerNorm: Command R, StableLM 2 and Nemotron."""

from dataclasses import replace

from headrace.models.gguf.layered.common import (
    NORMS,
    alike,
    attention,
    attention_sizes,
    base_config,
    biases,
    feed_forward,
    mlp,
    require_whole_heads,
    rotated_share,
    scaled_rope,
)
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, tables
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError


def _sizes(config: Config) -> dict[str, int]:
    return attention_sizes(config) | {"inner": config["intermediate_size"]}


def _command_r(metadata: Metadata, file: Contents) -> Config:
    config = base_config(metadata, file, "cohere", layer_norm="layer_norm_eps")
    require_whole_heads(config)
    return config | {
        "intermediate_size": feed_forward(metadata), "logit_scale": metadata.number("{arch}.logit_scale", 0.0) or 1.0,
        "attention_bias": False, "layer_norm_bias": False, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }  # fmt: skip


COMMAND_R = LayeredArchitecture(
    "CohereForCausalLM", _command_r, alike, _sizes,
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
    "StableLmForCausalLM", _stablelm, lambda config: [
        ("layer", *(() if config["use_parallel_residual"] else ("ffn_norm",)))
    ] * config["num_hidden_layers"], _sizes,
    {
        "layer": {
            **biases({"attn_norm": NORMS["attn_norm"]}), **mlp(),
            **biases(attention(), "attn_q", "attn_k", "attn_v", optional=True),
        },
        "ffn_norm": biases({"ffn_norm": NORMS["ffn_norm"]}),
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
    "NemotronForCausalLM", _nemotron, alike, _sizes,
    {
        "layer": {
            **_plus_one(NORMS["attn_norm"], "attn_norm"), **_plus_one(NORMS["ffn_norm"], "ffn_norm"), **attention(),
            "ffn_up": Part("mlp.up_proj", "inner hidden"), "ffn_down": Part("mlp.down_proj", "hidden inner"),
        },
    },
    tables() | _plus_one(tables()["output_norm"], "output_norm"),
)  # fmt: skip
