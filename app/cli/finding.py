"""A problem found by `headrace doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. `broken` keeps headrace from working, `advice` costs speed."""

    severity: Literal["broken", "advice"]
    what: str
    do: str
