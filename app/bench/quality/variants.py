"""Options and variants of a quality run; no model is loaded for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.app.bench.measure.peers import Peer
from headrace.app.bench.quality.divergence import Divergence
from headrace.app.bench.quality.peers import PeerLogits
from headrace.app.bench.quality.text import SCORED
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase

Condition = tuple[int, Phase]
"""(depth, phase)"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    kv: formats to compare with the default K/V; None: all packed ones, or none if `against` is set. against: models to
    compare with. peers: engines to compare with; the reference is then the same weights in float32. coarse: compare
    8-bit activations of prompts. depths: None means DEPTHS, as far as text and model go. threads: of every engine,
    None: headrace's choice.
    """

    model: str | None
    kv: Sequence[str] | None = None
    against: Sequence[str] = ()
    peers: Sequence[Peer] = ()
    coarse: bool = False
    depths: Sequence[int] | None = None
    scored: int = SCORED
    text: Path | None = None
    force: bool = False
    threads: int | None = None


@dataclass(slots=True)
class Variant:
    """A format, model or engine compared with the reference. It has a network or is a peer."""

    name: str
    kind: Literal["kv", "activations", "weights", "engine"]
    network: Network | None
    peer: PeerLogits | None = None
    found: dict[Condition, Divergence] = field(default_factory=dict)
    speeds: dict[Condition, float] = field(default_factory=dict)
    """Scored tokens per second."""
