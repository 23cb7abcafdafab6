"""Layers in a config.json: rotations, windows and positions, as most families state them.

`read.decoder_config` calls `ropes_of`, then `layers_of`; families call the others from functions of their rows.

Guards: tests/models/architectures/test_config.py and tests/parity/test_mlx_lm_families.py.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, Family, LayerConfig, RopeConfig
from headrace.models.architectures.fields import Fields
from headrace.runtime.errors import CheckpointError


def state_usual_names(config: Config, names: Mapping[str, str]) -> None:
    """State what a config has under its family's names under the usual ones. names: family's name -> usual name."""
    for stated, usual in names.items():
        if config.get(stated) is not None:
            config[usual] = config[stated]


def widened(config: Config, key: str) -> int | None:
    """Return the hidden size times the factor of this key, rounded down; None if the config lacks either.

    Raises CheckpointError for a factor that is no positive number, or too large.
    """
    width = config.get("hidden_size")
    if type(width) is not int or config.get(key) is None:
        return None
    product = width * Fields(config).positive(key)
    if product >= 2**31:
        raise CheckpointError(f"config.json: {key} is too large, {config[key]!r:.60}")
    return int(product)


def ropes_of(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers)."""
    if architecture.ropes is not None:
        return architecture.ropes(fields, architecture)
    rope = full_rope(fields, architecture)
    return rope, rope


def full_rope(
    fields: Fields, architecture: Architecture, *, older_names: tuple[str, ...] = (), share: float | None = None
) -> RopeConfig:
    """Return the rotation of full-attention layers.

    Older configs have `rope_theta` and `rope_scaling`; newer ones nest both under `rope_parameters`.

    older_names: kinds that are LongRoPE under other names.
    share: rotated part of a head; None: as stated.
    """
    nested = fields.section("rope_parameters")
    if "full_attention" in nested:  # one section per kind of layer
        nested = Fields(nested).section("full_attention")
    scaling = fields.section("rope_scaling") or nested
    source = nested if "rope_theta" in nested else fields.values
    theta = Fields(source).positive("rope_theta", default=architecture.theta)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind in older_names:
        kind = "longrope"
    if kind == "longrope":
        scaling = _with_trained_context(fields, scaling)
    if share is None:
        stated = Fields({**nested, **fields.values})
        share = stated.positive("partial_rotary_factor", default=architecture.rotated or 1.0)
    return RopeConfig(theta, kind, scaling if kind != "default" else None, share)


def ropes_by_kind(fields: Fields, _architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of `rope_parameters` with a section for each kind of layer."""
    sections = Fields(fields.section("rope_parameters"))
    full, sliding = (_section_rope(Fields(sections.section(f"{kind}_attention"))) for kind in ("full", "sliding"))
    return full, sliding


def _section_rope(section: Fields) -> RopeConfig:
    """Return the rotation of one section of `rope_parameters`."""
    kind = str(section.values.get("type") or section.values.get("rope_type") or "default")
    share = section.positive("partial_rotary_factor", default=1.0)
    return RopeConfig(section.positive("rope_theta", default=1e4), kind, section.values, share)


def head_size(fields: Fields) -> int:
    """Return the size of a head, stated or following from the width."""
    return fields.count("head_dim", default=fields.count("hidden_size") // fields.count("num_attention_heads"))


def check_shared_heads(heads: int, kv_heads: int) -> None:
    """Raise CheckpointError unless each K/V head is of as many query heads."""
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")


def _with_trained_context(fields: Fields, scaling: Mapping[str, object]) -> Mapping[str, object]:
    """Return a longrope section with the original context, which older configs have outside it."""
    key = "original_max_position_embeddings"
    stated = Fields({**fields.values, **{name: value for name, value in scaling.items() if value is not None}})
    # 4096: the default of mlx-lm's class of this rotation.
    longest = fields.count("max_position_embeddings", default=4096)
    return {**scaling, key: stated.count(key, default=min(longest, 4096))}


def layers_of(
    fields: Fields, architecture: Architecture, family: Family, rope: RopeConfig, local_rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """Return all layers.

    family: of the architecture, as this config changes it.
    rope, local_rope: of full-attention layers, of sliding layers.
    """
    # One or two letters a layer, for its halves, of families whose configs list halves (`nemotron._pairs`).
    pairs = architecture.pairs(fields.values) if architecture.pairs is not None else []
    count = len(pairs) or fields.count("num_hidden_layers")

    # Windows: of layers that slide, unless the config turns them off.
    switches = architecture.window_switches
    windowed = not switches or any(fields.values.get(key) for key in switches)
    window = fields.count("sliding_window") if windowed and fields.values.get("sliding_window") else None
    sliding = [window is not None and slides for slides in sliding_layers(fields, architecture, count)]

    # Rotation: of all layers, of those with a window, or as listed.
    rotates = [architecture.rotates(fields)] * count
    if architecture.position_free == "full" and window is not None:
        rotates = sliding
    elif architecture.position_free == "listed":
        rotates = _listed_rotations(fields, count)
    ropes = [local_rope if slides else rope for slides in sliding]  # of layers that rotate

    # Feed-forwards, and recurrent mixing.
    experts = [None] * count if architecture.experts is None else architecture.experts(fields, count)
    mixer = None if architecture.mixer is None else architecture.mixer(fields)
    mixes = [False] * count
    if mixer is not None:
        mixes = architecture.recurrent(fields, count)
    return tuple(
        LayerConfig(
            rope=ropes[i] if rotates[i] else None,
            window=window if sliding[i] else None,
            experts=experts[i],
            mixer=mixer if mixes[i] else None,
            attends=not mixes[i] or family.mixes_with_attention,
            feeds=not pairs or len(pairs[i]) > 1,  # two letters: it mixes tokens, and has a feed-forward
        )
        for i in range(count)
    )


def sliding_layers(fields: Fields, architecture: Architecture, count: int) -> list[bool]:
    """Return for each layer whether it attends through a sliding window."""
    kinds = fields.listed("layer_types", count)
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    if architecture.sliding == "period":
        pattern = fields.values.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not pattern.strip("LG"):  # EXAONE: "LLLG"
            return [pattern[i % len(pattern)] == "L" for i in range(count)]
        period = fields.count("sliding_window_pattern", default=architecture.period or 1)
        return [(i + 1) % period != 0 for i in range(count)]
    if architecture.sliding == "tail" and fields.values.get("use_sliding_window"):
        all_slide = fields.values.get("max_window_layers") == 0
        first = 0 if all_slide else fields.count("max_window_layers", default=count)
        return [i >= first for i in range(count)]
    return [architecture.sliding == "all" or (architecture.sliding == "even" and i % 2 == 0) for i in range(count)]


def with_sinks(decoder: DecoderConfig) -> DecoderConfig:
    """Give every layer sinks."""
    return replace(decoder, layers=tuple(replace(layer, sinks=True) for layer in decoder.layers))


def _listed_rotations(fields: Fields, count: int) -> list[bool]:
    """Return for each layer whether it rotates, as `no_rope_layers` lists it: 1 for a layer that does."""
    interval = fields.count("no_rope_layer_interval", default=4)
    listed = fields.values.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count:
        raise CheckpointError(f"config.json: no_rope_layers does not list {count} layers")
    return [bool(entry) for entry in listed]
