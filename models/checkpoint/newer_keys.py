"""Keys of mlx-lm's argument classes that transformers 5 writes under another name, in another form, or not at all."""

from collections.abc import Callable
from typing import Any

from headrace.runtime.errors import CheckpointError

Config = dict[str, Any]

# Class constants of transformers that mlx-lm reads from config.json, by model_type.
_CONSTANTS: dict[str, Config] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "solar_open": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "intermediate_size": 0},
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 1.0}},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "hunyuan_v1_moe": {
        "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False,
        "cla_share_factor": 2, "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
    },
    "mimo_v2_flash": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_shared_experts": None,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    },
}  # fmt: skip
# Text-only checkpoints whose class in mlx-lm has a nested text part.
_WRAPPED = {"gemma3n_text": "gemma3n"}


def add_older_keys(config: Config, kind: str) -> None:
    """Add the keys to one section of a config.json. Raises CheckpointError for lists that no key expresses."""
    for key, value in _CONSTANTS.get(kind, {}).items():
        if config.get(key) is None:
            config[key] = dict(value) if isinstance(value, dict) else value
    if kind in _RULES:
        _RULES[kind](config)


def wrapped(config: Config) -> Config:
    """Return a text-only config as the text part of the multimodal family, where mlx-lm has only that."""
    kind = config.get("model_type")
    outer = _WRAPPED.get(kind) if isinstance(kind, str) else None
    if kind == "llama4_text" and config.get("moe_layers"):  # mlx-lm's class of that name has no experts
        outer = "llama4"
    if outer is None:
        return config
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization", "quantization_config", "vocab_size")
    return {"model_type": outer, "text_config": config, **{key: config[key] for key in shared if key in config}}


def _gemma4(config: Config) -> None:
    """Add the head size and count of full-attention layers, which `per_layer_config` has by layer."""
    layers = config.get("per_layer_config")
    kinds = config.get("layer_types")
    if not isinstance(layers, dict):
        return
    known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if not isinstance(kinds, list) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise CheckpointError("config.json: per_layer_config does not fit layer_types")
    full = {str(number) for number, kind in enumerate(kinds) if kind == "full_attention"}
    for key in {key for entry in layers.values() for key in entry}:
        stated = {number: entry[key] for number, entry in layers.items() if key in entry}
        values = list(stated.values())
        if key not in known or stated.keys() != full or any(value != values[0] for value in values):
            raise CheckpointError(f"config.json: per_layer_config with {key!r:.40} for these layers is not supported")
        config.setdefault(known[key], values[0])


def _granite_hybrid(config: Config) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = [names.get(kind, kind) for kind in kinds]
    if config.get("position_embedding_type", "rope") is None:
        config["position_embedding_type"] = "nope"
    if config.get("num_local_experts") == 0 and config.get("shared_intermediate_size") is not None:
        config["intermediate_size"] = config["shared_intermediate_size"]  # the width of the only MLP there is


def _exaone4(config: Config) -> None:
    kinds = config.get("layer_types")
    if not isinstance(config.get("sliding_window_pattern"), int) or not isinstance(kinds, list):
        return
    pattern = config["sliding_window_pattern"]
    full = "full_attention"
    if config.get("sliding_window") is None or "sliding_attention" not in kinds:
        config["sliding_window"] = config["sliding_window_pattern"] = None
    elif kinds != [full if (i + 1) % pattern == 0 else "sliding_attention" for i in range(len(kinds))]:
        raise CheckpointError("config.json: layer_types must be periodic for this family")
    else:
        config["sliding_window_pattern"] = "L" * (pattern - 1) + "G"


def _exaone_moe(config: Config) -> None:
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        config.setdefault("is_moe_layer", [kind == "sparse" for kind in kinds])


def _mamba2(config: Config) -> None:
    width = config.get("hidden_size")
    factor = config.get("expand")
    if type(width) is int and isinstance(factor, int | float):
        config.setdefault("intermediate_size", int(width * factor))


def _qwen3_vl_moe(config: Config) -> None:
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])


def _mimo(config: Config) -> None:
    attention = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    rope = config.get("rope_parameters")
    if not (isinstance(attention, list) and isinstance(mlp, list) and isinstance(rope, dict)):
        return
    local = rope.get("sliding_attention") or {}
    config.setdefault("hybrid_layer_pattern", [int(kind == "sliding_attention") for kind in attention])
    config.setdefault("moe_layer_freq", [int(kind == "sparse") for kind in mlp])
    config.setdefault("layernorm_epsilon", config.get("rms_norm_eps"))
    config.setdefault("sliding_window_size", config.get("sliding_window"))
    config.setdefault("swa_rope_theta", local.get("rope_theta", 10000.0))
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        config.setdefault(f"swa_{key}", config.get(key))
    if type(config.get("num_key_value_heads")) is int:
        config.setdefault("swa_num_key_value_heads", 2 * config["num_key_value_heads"])


def _kimi_linear(config: Config) -> None:
    """Add the section of delta networks, and the first sparse layer."""
    kinds = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    if isinstance(mlp, list):
        dense = mlp.index("sparse") if "sparse" in mlp else len(mlp)
        if "dense" in mlp[dense:]:
            raise CheckpointError(
                "config.json: mlp_layer_types has a dense layer after a sparse one, which is not supported"
            )
        config.setdefault("first_k_dense_replace", dense)
    if not isinstance(kinds, list) or config.get("linear_attn_config") is not None:
        return
    config["linear_attn_config"] = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "num_heads": config.get("linear_num_heads"), "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4),
    }  # fmt: skip
    config.setdefault("rope_theta", 10000.0)  # its class takes one, and rotates nothing


def _minicpm3(config: Config) -> None:
    """State unscaled rotation as LongRoPE with factors of one, which is all its class takes."""
    pairs = config.get("qk_rope_head_dim")
    longest = config.get("max_position_embeddings")
    if config.get("rope_scaling") is None and type(pairs) is int and type(longest) is int:
        ones = [1.0] * (pairs // 2)
        factors = {"short_factor": ones, "long_factor": ones, "original_max_position_embeddings": longest}
        config["rope_scaling"] = {"type": "longrope", "rope_type": "longrope", **factors}


_RULES: dict[str, Callable[[Config], None]] = {
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "granitemoehybrid": _granite_hybrid,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "mamba2": _mamba2,
    "qwen3_vl_moe_text": _qwen3_vl_moe,
    "mimo_v2_flash": _mimo,
    "minicpm3": _minicpm3,
    "kimi_linear": _kimi_linear,
}
