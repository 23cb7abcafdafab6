"""Type checks of the known keys in a config.json.

Unchecked values can change results silently: "false" is true, True is one, and a division by zero ends the process.
Unknown keys and null are accepted. `normalize` checks every config before it reads it. A key of sizes or factors that a
family begins to read is added to the tuple of its kind here, or read through `architectures.fields.Fields`.

Guard: tests/faults/test_config_fuzz.py.
"""

from collections.abc import Callable, Mapping
from typing import TypeGuard

from headrace.runtime.errors import CheckpointError

# Integers of at least one. Some families have a list with one for each layer.
_COUNTS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_head", "n_positions", "n_ctx", "n_group", "topk_group",
    "state_size", "conv_kernel", "original_max_position_embeddings",
)  # fmt: skip
# Layer counts. Bounded, since a decoder takes memory for each layer before it finds that weights are missing.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MAX_LAYERS = 1_000
# Integers of at least zero.
_ZERO_OR_MORE = (
    "intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts",
    "n_shared_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window",
    "first_k_dense_replace", "max_window_layers", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "rotary_dim", "decoder_sparse_step", "moe_layer_freq", "full_attention_interval", "attention_chunk_size",
)  # fmt: skip
# Numbers above zero.
_POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta",
    "rope_local_base_freq", "rotary_emb_base", "query_pre_attn_scalar",
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
    "routed_scaling_factor", "attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap",
)  # fmt: skip
# Numbers above zero, at most one.
_SHARES = ("partial_rotary_factor", "rotary_pct")
# Booleans, or 0 and 1.
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
# Sections of a rope section: kinds of layers, and DeepSeek V4's without and with pooled entries
_LAYER_KINDS = (
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "main", "compress",
)  # fmt: skip


def check_types(config: Mapping[str, object]) -> None:
    """Raise CheckpointError for the first known key with another type or an impossible value."""
    for keys, is_valid, expected in _RULES:
        for key in keys:
            _check(config, key, is_valid, expected)
    for key in _SECTIONS:
        _check(config, key, lambda value: isinstance(value, Mapping), "an object")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            _check_rope(key, rope)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        check_types(text)


def _check_rope(name: str, section: Mapping[str, object]) -> None:
    """Check a rope section, or the sections for each kind of layer within it."""
    kinds = [kind for kind in _LAYER_KINDS if kind in section]
    for kind in kinds:
        rope = section[kind]
        if not isinstance(rope, Mapping | None):
            raise CheckpointError(f"config.json: {name} has {rope!r:.60} for a kind of layer, not an object")
        _check_rope(name, rope or {})
    if kinds:
        return
    for key in _ROPE_POSITIVE:
        _check(section, key, _or_list(_is_positive), "a positive number", name)
    for key in _SHARES:
        _check(section, key, _or_list(_is_share), "above 0 and at most 1", name)
    _check(section, "original_max_position_embeddings", _is_count, "a positive integer", name)
    stated = [section[key] for key in ("rope_type", "type") if key in section]
    types = [rope_type for rope_type in stated if isinstance(rope_type, str)]
    rope_type = "default"
    if types:
        rope_type = types[0]
    elif section and (stated or "rope_theta" not in section):
        raise CheckpointError(f"config.json: {name} has no type")
    for key in _ROPE_NEEDS.get(rope_type, ()):
        if section.get(key) is None:
            raise CheckpointError(f"config.json: {name} of type {rope_type!r:.20} has no {key}")


def _check(
    config: Mapping[str, object],
    key: str,
    is_valid: Callable[[object], bool],
    expected: str,
    section: str | None = None,
) -> None:
    """Raise CheckpointError for a value that is neither missing, null nor valid.

    config: the object that has the key.
    expected: valid values in words, for the error.
    section: name of the object, for the error; None: config.json itself.
    """
    value = config.get(key)
    if value is not None and not is_valid(value):
        name = f"{section}.{key}" if section else key
        raise CheckpointError(f"config.json: {name} must be {expected}, not {value!r:.60}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[float]:
    return _is_number(value) and value == value // 1 and abs(value) < 2**31  # 8.0 is, NaN and infinity are not


def _is_count(value: object) -> TypeGuard[float]:
    return _is_whole(value) and value >= 1


def _is_zero_or_more(value: object) -> bool:
    return _is_whole(value) and value >= 0


def _is_positive(value: object) -> TypeGuard[float]:
    return _is_number(value) and 0 < value < 1e30


def _is_share(value: object) -> bool:
    return _is_positive(value) and value <= 1


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _or_list(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a check that accepts a valid value, and a list of valid values and nulls."""

    def is_valid_or_list(value: object) -> bool:
        if isinstance(value, list):
            return all(entry is None or is_valid(entry) for entry in value)
        return is_valid(value)

    return is_valid_or_list


# Keys, check of a value, valid values in words.
_RULES: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (("model_type",), lambda value: isinstance(value, str), "a name"),
    (_COUNTS, _or_list(_is_count), "a positive integer"),
    (_LAYERS, lambda value: _is_count(value) and value <= MAX_LAYERS, f"from 1 to {MAX_LAYERS:,}"),
    (_ZERO_OR_MORE, _or_list(_is_zero_or_more), "a whole number"),
    (_POSITIVE, _or_list(_is_positive), "a positive number"),
    (_SHARES, _or_list(_is_share), "above 0 and at most 1"),
    (
        ("attn_temperature_tuning",),
        lambda value: _is_flag(value) or _is_zero_or_more(value),
        "true, false or a whole number",
    ),
    (_FLAGS, _is_flag, "true or false"),
    (_LISTS, lambda value: isinstance(value, list), "a list"),
    (_KINDS, _is_list_of_names, "a list of names"),
)
