"""Configuration of one layer of headrace's decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.models.network.experts_config import ExpertsConfig
from headrace.models.network.mixer_config import MixerConfig


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
    reads, None for its own. projects: see `AttentionSpec`.
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
