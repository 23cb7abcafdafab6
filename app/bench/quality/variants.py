"""Options and variants of a quality run; no model is loaded for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.app.bench.quality.text import SCORED
from headrace.models.loading.divergence import Divergence
from headrace.models.loading.forcing import Scores
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase

Condition = tuple[int, Phase]
"""(depth, phase)"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    kv: formats to compare with the default K/V; None: all packed ones, or none if `against` is set. against: models to
    compare with. coarse: compare 8-bit activations of prompts. depths: None means DEPTHS, as far as text and model go.
    threads: None means headrace's choice.
    """

    model: str | None
    kv: Sequence[str] | None = None
    against: Sequence[str] = ()
    coarse: bool = False
    depths: Sequence[int] | None = None
    scored: int = SCORED
    text: Path | None = None
    force: bool = False
    threads: int | None = None


@dataclass(slots=True)
class Variant:
    """A format or model compared with the reference.

    kind: `engine` for another program, which has no network here but `scores`.
    """

    name: str
    kind: Literal["kv", "activations", "weights", "engine"]
    network: Network | None
    scores: Scores | None = None
    found: dict[Condition, Divergence] = field(default_factory=dict)
    speeds: dict[Condition, float] = field(default_factory=dict)
    """Scored tokens per second."""
