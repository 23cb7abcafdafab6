"""Options and variants of a quality run; no model is loaded for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.app.bench.quality.divergence import Divergence
from headrace.app.bench.quality.text import SCORED
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase

Condition = tuple[int, Phase]
"""(depth, phase)"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    kv: formats to compare with the default K/V; None: all packed ones, or none if `against` is set. against: models to
    compare with. depths: None means DEPTHS, as far as text and model go.
    """

    model: str | None
    kv: Sequence[str] | None = None
    against: Sequence[str] = ()
    depths: Sequence[int] | None = None
    scored: int = SCORED
    text: Path | None = None
    force: bool = False


@dataclass(slots=True)
class Variant:
    """A format or model compared with the reference."""

    name: str
    kind: Literal["kv", "weights"]
    network: Network
    found: dict[Condition, Divergence] = field(default_factory=dict)
