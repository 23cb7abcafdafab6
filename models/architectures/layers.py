"""Configuration of one layer of headrace's decoder, and the layers with positions and windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.models.architectures.experts import ExpertsConfig
from headrace.models.architectures.families import Family
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import MixerConfig
from headrace.runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class RopeConfig:
    """Rotation of one kind of layer: base frequency, and the checkpoint's scaling section.

    share: rotated part of a head. Compared by identity: layers of one kind share one object.
    """

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that vary by layer: rotation (None: no position information), attention window and experts.

    mixer: recurrent mixing, in place of attention unless the layer `attends`. feeds: it has a feed-forward. kv_heads,
    head_dim, inner (size of the feed-forward): 0 for those of the `DecoderConfig`. source: layer whose K/V this one
    reads, None for its own. projects, growth, chunked: see `AttentionSpec`.
    """

    rope: RopeConfig | None
    window: int | None = None
    experts: ExpertsConfig | None = None
    mixer: MixerConfig | None = None
    attends: bool = True
    feeds: bool = True
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    source: int | None = None
    projects: Literal["q", "qk", "qkv"] = "qkv"
    growth: tuple[float, int, int] | None = None
    chunked: bool = False


def has_positions(fields: Fields) -> bool:
    """Return whether attention rotates queries and keys at all."""
    kind = fields.values["model_type"]
    nested = fields.section("rope_parameters")
    if kind == "olmo_hybrid":
        return (nested if "rope_theta" in nested else fields.values).get("rope_theta") is not None
    stated = fields.values.get("position_embedding_type", "rope")
    return kind not in ("nemotron_h", "kimi_linear") and stated != "nope"


def sliding_layers(fields: Fields, family: Family, count: int) -> list[bool]:
    """Return for each layer whether it attends through a sliding window."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise CheckpointError(f"config.json: layer_types does not list {count} layers")
        return [kind == "sliding_attention" for kind in kinds]
    if family.sliding == "period":
        pattern = fields.values.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not pattern.strip("LG"):  # EXAONE: "LLLG"
            return [pattern[i % len(pattern)] == "L" for i in range(count)]
        period = fields.count("sliding_window_pattern", default=family.period or 1)
        return [(i + 1) % period != 0 for i in range(count)]
    if family.sliding == "tail" and fields.values.get("use_sliding_window"):
        all_slide = fields.values.get("max_window_layers") == 0
        first = 0 if all_slide else fields.count("max_window_layers", default=count)
        return [i >= first for i in range(count)]
    return [family.sliding == "all" or (family.sliding == "even" and i % 2 == 0) for i in range(count)]


def joint_norms(family: Family, layer: LayerConfig) -> int:
    """Return the norms over all heads of a layer: of queries and keys together, and of a Mamba mixer."""
    mixer = layer.mixer
    mamba = mixer is not None and mixer.sizes.kind == "ssm" and mixer.norm_parts == 1
    return int(layer.attends and family.qk_norm == "heads") + int(mamba)
