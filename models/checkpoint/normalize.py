"""Normalization of config.json across releases of transformers and other tools.

transformers 5 nests rope settings (`rope_parameters`), renames keys, and omits class defaults from nested sections.
Older names are added to a config; existing values stay, except that nested rope settings take precedence.

`open_checkpoint` normalizes each config once, so that headrace's decoder and mlx-lm's classes find their keys. Facts of
a family are in its row (`Architecture`: `defaults`, `older_keys`, `constants`, `add_keys` and others).

Guard: tests/models/checkpoint/test_normalize.py.
"""

from collections.abc import Collection, Mapping
from copy import deepcopy

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.config_types import check_types
from headrace.models.checkpoint.json_object import is_deep
from headrace.runtime.errors import CheckpointError

_RENAMES = {"torch_dtype": "dtype"}  # older key -> newer one, of all families
# Other names of the maximum context.
_CONTEXT_KEYS = ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length")
_MOST_LEVELS = 31  # of nested objects and lists: functions here call themselves for each. Real configs have six
# Infinities, as transformers writes them -> their values
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf")}


def normalized(config: Mapping[str, object], tensors: Collection[str] = ()) -> dict[str, object]:
    """Return the config with all keys that the decoders read, where it implies them.

    tensors: names in the checkpoint. Raises CheckpointError for known keys of wrong types (see `config_types`).
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
