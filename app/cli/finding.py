"""One thing that `headrace doctor` finds wrong."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something wrong and what to do about it. `broken` keeps headrace from working, `advice` costs speed."""

    severity: Literal["broken", "advice"]
    what: str
    do: str
