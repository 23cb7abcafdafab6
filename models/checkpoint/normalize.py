"""One form of config.json across releases of transformers and other tools, and the types of its known keys.

transformers 5 nests rope settings (`rope_parameters`), renames keys, and omits class defaults from nested sections.
Older names are added to a config; existing values stay, except that nested rope settings take precedence.

`open_checkpoint` normalizes each config once, so that headrace's decoder and mlx-lm's classes find their keys. Facts of
a family are in its row (`Architecture`: `defaults`, `older_keys`, `constants`, `add_keys` and others).

Types are checked first, since a wrong one can change results silently: "false" is true, True is one, and a division by
zero ends the process. Unknown keys and null are accepted. A key of sizes or factors that a family begins to read is
added to the tuple of its kind, or read through `architectures.fields.Fields`.

Guards: tests/models/checkpoint/test_normalize.py and tests/faults/test_config_fuzz.py.
"""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import TypeGuard

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.side_file import is_deep
from headrace.runtime.errors import CheckpointError

_RENAMES = {"torch_dtype": "dtype"}  # older key -> newer one, of all families
# Other names of the maximum context.
_CONTEXT_KEYS = ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length")
_MOST_LEVELS = 31  # of nested objects and lists: functions here call themselves for each. Real configs have six
# Infinities, as transformers writes them -> their values
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf")}


def normalized(config: Mapping[str, object], tensors: Collection[str] = ()) -> dict[str, object]:
    """Return the config with all keys that the decoders read, where it implies them.

    tensors: names in the checkpoint. Raises CheckpointError for known keys of wrong types.
    """
    if is_deep(config, _MOST_LEVELS):
        raise CheckpointError("config.json is nested too deeply")
    result = _unnested({key: _plain_floats(value) for key, value in config.items()})
    check_types(result)
    text = result.get("text_config")
    if isinstance(text, dict):
        for key, value in architecture_of(text).nested_defaults.items():
            text.setdefault(key, result.get(key) or value)
        text = _section(text)
        result["text_config"] = text
        for key in architecture_of(result).outer_keys:
            if key in text:
                result.setdefault(key, text[key])
    return _wrapped(_tied(_section(result), tensors))


def _unnested(config: dict[str, object]) -> dict[str, object]:
    """Return an omni model's config with the text part of its thinker, which reads and writes text, as its own."""
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict) or config.get("text_config") or "text_config" not in thinker:
        return config
    return {**config, "text_config": thinker["text_config"]}


def _wrapped(config: dict[str, object]) -> dict[str, object]:
    """Return a text-only config as the text part of a multimodal one, if its row says so (`outer`)."""
    outer = architecture_of(config).outer
    if outer is None:
        return config
    kind = outer(config)
    if kind is None:
        return config
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization", "quantization_config", "vocab_size")
    return {"model_type": kind, "text_config": config, **{key: config[key] for key in shared if key in config}}


def _section(config: dict[str, object]) -> dict[str, object]:
    """Add the keys of a text-only config, of a text part, or of a multimodal whole, in the order of `Architecture`."""
    if not isinstance(config.get("model_type"), str):
        return config
    # The rows of this model_type.
    stated = architecture_of(config)  # as it is in the file
    if stated.same_as:
        config["model_type"] = stated.same_as
    architecture = architecture_of(config)  # the row that has its layers

    # Keys that follow from others.
    _unnest_rope(config)
    for key, default in architecture.defaults.items():
        if config.get(key) is None:
            config[key] = default
    for table in (_RENAMES, architecture.older_keys):
        for old, new in table.items():
            if new in config:
                config.setdefault(old, config[new])
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if (
        architecture.states_head_dim
        and config.get("head_dim") is None
        and isinstance(hidden, int)
        and isinstance(heads, int)
    ):
        config["head_dim"] = hidden // max(heads, 1)

    # The family's own facts: constants of this model_type, then what the row with its layers adds.
    for key, value in stated.constants.items():
        if config.get(key) is None:
            config[key] = deepcopy(value)  # later steps add keys to sections
    if architecture.add_keys is not None:
        architecture.add_keys(config)
    _layer_kinds(config, architecture)
    _context(config, architecture)
    return config


def _unnest_rope(config: dict[str, object]) -> None:
    """Add `rope_theta`, `rope_scaling` and related keys from `rope_parameters`, which may be per kind of layer."""
    nested = config.get("rope_parameters")
    if nested is None:
        return
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: rope_parameters must be an object, not {nested!r:.60}")

    # The section of full attention; of the other one older keys have the base alone.
    full = nested
    if isinstance(nested.get("full_attention"), dict):
        full = nested["full_attention"]
        local = nested.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if full.get(key) is not None:
            config[key] = full[key]

    # The rest of it is the scaling.
    kind = full.get("rope_type") or full.get("type") or "default"
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    scaling |= {"type": kind, "rope_type": kind}
    # The type "axial" has positions along several axes, as images have; it states no factors either.
    config["rope_scaling"] = None
    if kind not in ("default", "axial"):
        config["rope_scaling"] = scaling

    # LongRoPE's original context stands in both places: classes read the one or the other.
    trained = full.get("original_max_position_embeddings")
    if kind == "longrope":
        trained = trained or config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        config["original_max_position_embeddings"] = trained
        scaling["original_max_position_embeddings"] = trained


def _layer_kinds(config: dict[str, object], architecture: Architecture) -> None:
    """Add the older keys that count layers, from the lists of layer kinds."""
    attention = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    if isinstance(attention, list) and "full_attention" in attention:
        period = attention.index("full_attention") + 1
        one_period = [*[attention[0]] * (period - 1), "full_attention"]
        is_periodic = all(kind == one_period[index % period] for index, kind in enumerate(attention))
        if architecture.period_key and is_periodic:
            config.setdefault(architecture.period_key, period)
        elif architecture.only_periodic:
            raise CheckpointError("config.json: layer_types must be periodic for this family")
    if isinstance(mlp, list) and architecture.dense_first:
        dense = next((i for i, entry in enumerate(mlp) if entry != "dense"), len(mlp))
        if "dense" in mlp[dense:]:
            raise CheckpointError(
                "config.json: mlp_layer_types has a dense layer after a sparse one, which is not supported"
            )
        config.setdefault("first_k_dense_replace", dense)


def _context(config: dict[str, object], architecture: Architecture) -> None:
    """Add the maximum context, and the original one to a rope section that is scaled by it. Raises CheckpointError."""
    if config.get("max_position_embeddings") is None:
        stated = next((config[key] for key in _CONTEXT_KEYS if type(config.get(key)) is int), architecture.context)
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


def _tied(config: dict[str, object], tensors: Collection[str]) -> dict[str, object]:
    """State untied embeddings if the checkpoint has an output head, and the outer config does not tie them."""
    head = any(name.endswith("lm_head.weight") for name in tensors)
    tied = config.get("tie_word_embeddings")
    for section in (config, config.get("text_config")):
        if head and isinstance(section, dict) and (section.get("tie_word_embeddings") is None or tied is False):
            section["tie_word_embeddings"] = False
    return config


def _plain_floats(value: object) -> object:
    """Replace {"__float__": "Infinity"}, as transformers writes infinities."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and str(value["__float__"]) in _FLOATS:
            return _FLOATS[str(value["__float__"])]
        return {key: _plain_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_floats(item) for item in value]
    return value


# Types of the known keys

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
