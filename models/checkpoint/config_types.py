"""Type checks of the known keys in a config.json.

Unchecked values can change results silently: "false" is true, True is one, and a division by zero ends the process.
Unknown keys and null are accepted.
"""

from collections.abc import Callable, Mapping
from typing import TypeGuard

from headrace.runtime.errors import CheckpointError

# Integers of at least one, or for some families a list with one for each layer.
_COUNTS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_head", "n_positions", "n_ctx", "n_group", "topk_group",
    "state_size", "conv_kernel", "original_max_position_embeddings",
)  # fmt: skip
# Layer counts. Bounded, since a decoder takes memory for each layer before it finds that weights are missing.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MOST_LAYERS = 1_000
# Integers of at least zero.
_NUMBERS_OF = (
    "intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts",
    "n_shared_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window",
    "first_k_dense_replace", "max_window_layers", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "rotary_dim", "decoder_sparse_step", "moe_layer_freq", "full_attention_interval", "attention_chunk_size",
)  # fmt: skip
_POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta",
    "rope_local_base_freq", "rotary_emb_base", "query_pre_attn_scalar",
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
    "routed_scaling_factor", "attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap",
)  # fmt: skip
_SHARES = ("partial_rotary_factor", "rotary_pct")
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_qk_norm", "use_sliding_window",
    "qk_layernorm", "use_parallel_residual", "use_bias", "use_conv_bias", "rope_traditional", "moe_renormalize",
)  # fmt: skip
_LISTS = ("no_rope_layers", "mlp_only_layers", "moe_layers")
_KINDS = ("layer_types", "mlp_layer_types")
_SECTIONS = ("rope_parameters", "rope_scaling", "text_config")
# Keys that a rope section of each type requires.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}
_ROPE_POSITIVE = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "short_mscale", "long_mscale",
)  # fmt: skip
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def check_types(config: Mapping[str, object]) -> None:
    """Raise CheckpointError for the first known key with another type or an impossible value."""
    for keys, holds, what in _RULES:
        for key in keys:
            _check(config, key, holds, what)
    for key in _SECTIONS:
        _check(config, key, lambda value: isinstance(value, Mapping), "an object")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            _check_rope(key, rope)
    if isinstance(text := config.get("text_config"), Mapping):
        check_types(text)


def _check_rope(name: str, section: Mapping[str, object]) -> None:
    kinds = [section[kind] for kind in _LAYER_KINDS if kind in section]
    if kinds:
        for kind in kinds:
            if not isinstance(kind, Mapping | None):
                raise CheckpointError(f"config.json: {name} has {kind!r:.60} for a kind of layer, not an object")
            _check_rope(name, kind or {})
        return
    for key in _ROPE_POSITIVE:
        _check(section, key, _each(_positive), "a positive number", name)
    for key in _SHARES:
        _check(section, key, _each(_share), "above 0 and at most 1", name)
    _check(section, "original_max_position_embeddings", _count, "a positive integer", name)
    stated = [section[key] for key in ("rope_type", "type") if key in section]
    if section and not any(isinstance(kind, str) for kind in stated) and (stated or "rope_theta" not in section):
        raise CheckpointError(f"config.json: {name} has no type")
    kind = next((kind for kind in stated if isinstance(kind, str)), "default")
    for key in _ROPE_NEEDS.get(kind, ()):
        if section.get(key) is None:
            raise CheckpointError(f"config.json: {name} of type {kind!r:.20} has no {key}")


def _check(
    config: Mapping[str, object], key: str, holds: Callable[[object], bool], what: str, section: str | None = None
) -> None:
    value = config.get(key)
    if value is not None and not holds(value):
        name = f"{section}.{key}" if section else key
        raise CheckpointError(f"config.json: {name} must be {what}, not {value!r:.60}")


def _whole(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1 and abs(value) < 2**31


def _count(value: object) -> TypeGuard[float]:
    return _whole(value) and value >= 1


def _number_of(value: object) -> bool:
    return _whole(value) and value >= 0


def _positive(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < 1e30


def _share(value: object) -> bool:
    return _positive(value) and value <= 1


def _flag(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))


def _each(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    """Accept lists of such values too."""

    def holds_each(value: object) -> bool:
        return all(entry is None or holds(entry) for entry in value) if isinstance(value, list) else holds(value)

    return holds_each


_RULES: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (("model_type",), lambda value: isinstance(value, str), "a name"),
    (_COUNTS, _each(_count), "a positive integer"),
    (_LAYERS, lambda value: _count(value) and value <= MOST_LAYERS, f"from 1 to {MOST_LAYERS:,}"),
    (_NUMBERS_OF, _each(_number_of), "a whole number"),
    (_POSITIVE, _each(_positive), "a positive number"),
    (_SHARES, _each(_share), "above 0 and at most 1"),
    (("attn_temperature_tuning",), lambda value: _flag(value) or _number_of(value), "true, false or a whole number"),
    (_FLAGS, _flag, "true or false"),
    (_LISTS, lambda value: isinstance(value, list), "a list"),
    (_KINDS, lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value), "a list of names"),
)
