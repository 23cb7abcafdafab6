"""Normalization of config.json across releases of transformers and other tools.

transformers 5 nests rope settings (`rope_parameters`), renames keys, and omits class defaults from nested sections.
Older names are added to a config; existing values stay, except that nested rope settings take precedence.
"""

from collections.abc import Collection, Mapping
from typing import Any

from headrace.models.checkpoint.config_types import check_types
from headrace.models.checkpoint.newer_keys import add_older_keys, wrapped
from headrace.runtime.errors import CheckpointError

# model_type -> an equivalent one.
_FAMILIES = {
    "ministral": "mistral",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma4_unified_text": "gemma4_text",
    "hunyuan_v1_moe": "hunyuan",
    "minimax_m2": "minimax",
}

# older key -> equivalent newer key, by model_type ("": all families).
_RENAMES: dict[str, dict[str, str]] = {
    "": {"torch_dtype": "dtype"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "mellum": {"num_experts": "num_local_experts"},
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "gpt2": {"n_ctx": "n_positions"},
    "lfm2": {"block_dim": "hidden_size", "block_ff_dim": "intermediate_size"},
}
# transformers' defaults that differ from those of mlx-lm's classes or of our decoder.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_next": {"norm_topk_prob": True},
    "gemma2": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "gemma4_text": {"sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
    "cohere2": {"sliding_window": 4096},
}
# Families whose older configs always have head_dim.
_STATE_HEAD_DIM = ("qwen3_moe", "glm4_moe", "exaone4", "exaone_moe", "falcon_h1")
# Other names of the maximum context, and transformers' defaults for nested sections without it.
_CONTEXT_KEYS = ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length")
_CONTEXTS = {"gemma3_text": 131072, "gemma2": 8192, "gemma": 8192, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}
# Class defaults that transformers omits from nested sections.
_NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "rms_norm_eps": 1e-6,
    },
    "qwen3_vl_text": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128000,
    },
    "qwen2_5_vl_text": {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
    },
}  # fmt: skip
_MOST_LEVELS = 32
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf")}


def normalized(config: Mapping[str, Any], tensors: Collection[str] = ()) -> dict[str, Any]:
    """Return the config with all keys that the decoders read, where it implies them.

    tensors: names in the checkpoint. Raises CheckpointError for known keys of wrong types (see `config_types`).
    """
    if _is_deep(config):
        raise CheckpointError("config.json is nested too deeply")
    result: dict[str, Any] = _plain_floats(config)
    check_types(result)
    text = result.get("text_config")
    if isinstance(text, dict):
        if isinstance(kind := text.get("model_type"), str):
            for key, value in _NESTED_DEFAULTS.get(kind, {}).items():
                text.setdefault(key, result.get(key) or value)
        result["text_config"] = text = _section(text)
        if str(result.get("model_type")).startswith("gemma4") and "vocab_size" in text:
            result.setdefault("vocab_size", text["vocab_size"])  # its class takes no other
    return wrapped(_tied(_section(result), tensors))


def _is_deep(value: Any) -> bool:
    """Return whether it has over `_MOST_LEVELS` levels, too many for recursion; real configs have six."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [child for part in inner for child in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return False
    return True


def _section(config: dict[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return config
    stated = kind
    kind = _FAMILIES.get(kind, kind)
    config["model_type"] = kind
    _unnest_rope(config)
    for key, default in _DEFAULTS.get(kind, {}).items():
        if config.get(key) is None:
            config[key] = default
    for table in (_RENAMES[""], _RENAMES.get(kind, {})):
        for old, new in table.items():
            if new in config:
                config.setdefault(old, config[new])
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if (
        kind in _STATE_HEAD_DIM
        and config.get("head_dim") is None
        and isinstance(hidden, int)
        and isinstance(heads, int)
    ):
        config["head_dim"] = hidden // max(heads, 1)
    if kind.startswith("minimax") and kind in ("minimax", "minimax_m2"):
        _minimax(config)
    add_older_keys(config, stated)
    _layer_kinds(config, kind)
    _context(config, kind)
    return config


def _unnest_rope(config: dict[str, Any]) -> None:
    """Add `rope_theta`, `rope_scaling` and related keys from `rope_parameters`, which may be per kind of layer."""
    nested = config.get("rope_parameters")
    if nested is None:
        return
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: rope_parameters must be an object, not {nested!r:.60}")
    full = nested
    if isinstance(nested.get("full_attention"), dict):
        full = nested["full_attention"]
        local = nested.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if full.get(key) is not None:
            config[key] = full[key]
    kind = full.get("rope_type") or full.get("type") or "default"
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = None if kind in ("default", "axial") else {**scaling, "type": kind, "rope_type": kind}
    trained = full.get("original_max_position_embeddings")
    if kind == "longrope":
        trained = trained or config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        config["original_max_position_embeddings"] = trained
        config["rope_scaling"]["original_max_position_embeddings"] = trained


def _minimax(config: dict[str, Any]) -> None:
    share = config.get("partial_rotary_factor") or 1.0
    width = config.get("head_dim")
    if isinstance(share, int | float) and type(width) is int:
        config.setdefault("rotary_dim", int(share * width))
    config.setdefault("shared_intermediate_size", 0)


def _layer_kinds(config: dict[str, Any], kind: str) -> None:
    """Add the older keys that count layers, from the lists of layer kinds."""
    attention = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    if isinstance(attention, list) and "full_attention" in attention:
        period = attention.index("full_attention") + 1
        expected = ["full_attention" if (i + 1) % period == 0 else attention[0] for i in range(len(attention))]
        older = {"qwen3_next": "full_attention_interval", "gemma3_text": "sliding_window_pattern"}
        older |= {"cohere2": "sliding_window_pattern"}
        older |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "full_attention_interval")
        if kind in older and attention == expected:
            config.setdefault(older[kind], period)
        elif kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "cohere2"):
            raise CheckpointError("config.json: layer_types must be periodic for this family")
    if isinstance(mlp, list) and kind in ("glm4_moe_lite", "exaone_moe", "glm_moe_dsa"):
        dense = next((i for i, entry in enumerate(mlp) if entry != "dense"), len(mlp))
        if "dense" in mlp[dense:]:
            raise CheckpointError(
                "config.json: mlp_layer_types has a dense layer after a sparse one, which is not supported"
            )
        config.setdefault("first_k_dense_replace", dense)


def _context(config: dict[str, Any], kind: str) -> None:
    if config.get("max_position_embeddings") is None:
        stated = next((config[key] for key in _CONTEXT_KEYS if type(config.get(key)) is int), _CONTEXTS.get(kind))
        if stated is not None:
            config["max_position_embeddings"] = stated
    scaling = config.get("rope_scaling")
    longest = config.get("max_position_embeddings")
    if isinstance(scaling, dict):
        rope = scaling.get("rope_type") or scaling.get("type")
        if rope == "longrope" and longest is None:
            raise CheckpointError("config.json: max_position_embeddings is missing, which longrope is scaled by")
        if rope == "yarn" and longest is not None and scaling.get("original_max_position_embeddings") is None:
            scaling["original_max_position_embeddings"] = longest


def _tied(config: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """State untied embeddings if the checkpoint has an output head, and the outer config does not tie them."""
    head = any(name.endswith("lm_head.weight") for name in tensors)
    tied = config.get("tie_word_embeddings")
    for section in (config, config.get("text_config")):
        if head and isinstance(section, dict) and (section.get("tie_word_embeddings") is None or tied is False):
            section["tie_word_embeddings"] = False
    return config


def _plain_floats(value: Any) -> Any:
    """Replace {"__float__": "Infinity"}, as transformers writes infinities."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and str(value["__float__"]) in _FLOATS:
            return _FLOATS[str(value["__float__"])]
        return {key: _plain_floats(item) for key, item in value.items()}
    return [_plain_floats(item) for item in value] if isinstance(value, list) else value
