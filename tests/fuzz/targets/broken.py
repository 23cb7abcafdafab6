"""A target with every kind of problem, for the test of the driver."""

import os
import random
from pathlib import Path

from headrace.runtime.errors import HeadraceError, UsageError


class Everything:
    """The input number modulo 8 selects the problem."""

    def __init__(self, folder: Path) -> None:
        self._held = b""

    def make(self, chance: random.Random) -> int:
        return chance.randrange(8)

    def run(self, given: int) -> None:
        match given:
            case 1:
                raise UsageError("as it should be", "a hint")
            case 2:
                raise HeadraceError("two\nlines")
            case 3:
                raise KeyError("foreign")
            case 4:
                os.abort()
            case 5:
                self._held = bytes(range(256)) * (300 << 12)
                self._held = b""
            case 6:
                raise SystemExit(3)
