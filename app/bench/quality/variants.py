"""What a run of `bench --quality` is asked for, and what it fills in. No model is loaded for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.app.bench.quality.divergence import Divergence
from headrace.app.bench.quality.text import SCORED
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase

Condition = tuple[int, Phase]
"""(depth, phase)"""


@dataclass(frozen=True, slots=True)
class Options:
    """`kv`: names of formats, held against the K/V that the model has by default; None: all packed ones it can have,
    or none where there is `against`. `against`: other models, held against it. `depths` None: DEPTHS, as far as text
    and model go."""

    model: str | None
    kv: Sequence[str] | None = None
    against: Sequence[str] = ()
    depths: Sequence[int] | None = None
    scored: int = SCORED
    text: Path | None = None
    force: bool = False


@dataclass(slots=True)
class Variant:
    """What is held against the reference."""

    name: str
    kind: Literal["kv", "weights"]
    network: Network[Any]
    found: dict[Condition, Divergence] = field(default_factory=dict)
