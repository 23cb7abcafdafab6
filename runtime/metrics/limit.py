"""The limit of a step: the least time that memory and arithmetic allow, and which of the two it is."""

from dataclasses import dataclass
from typing import Literal

Roof = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class StepLimit:
    """seconds: least time of a step. roof: what takes that long."""

    seconds: float
    roof: Roof


def step_limit(
    nbytes: float, flops: float, bytes_per_second: float, flops_per_second: float | None = None
) -> StepLimit:
    """Return the limit of a step that moves `nbytes` and computes `flops`.

    flops_per_second: of the machine; None if unknown: then arithmetic limits nothing.
    """
    reading_s = nbytes / bytes_per_second
    computing_s = 0.0
    if flops_per_second:
        computing_s = flops / flops_per_second
    if computing_s > reading_s:
        return StepLimit(computing_s, "arithmetic")
    return StepLimit(reading_s, "memory")
