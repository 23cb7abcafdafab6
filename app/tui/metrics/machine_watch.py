"""Looks at the machine every two seconds, from the first model on. Knows no widget.

A look costs well under a thousandth of that. Where psutil does not load or the machine does not let it read, nothing
is known and nothing else is lost.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.runtime.machine.load import Load
    from headrace.runtime.machine.load_sampler import LoadSampler

LOOK_S = 2.0


class MachineWatch:
    """`begin` once it is known what decodes, then `look` as often as you like."""

    def __init__(self, own: Callable[[], Sequence[int]]) -> None:
        """own: the processes of this program at this moment."""
        self._own = own
        self._sampler: LoadSampler | None = None
        self._due = 0.0

    def begin(self, backend: str) -> None:
        """A model is loaded, on the device of this backend."""
        if self._sampler is None:
            try:
                from headrace.runtime.machine.load_sampler import (
                    LoadSampler,
                )  # psutil takes 30 ms, which no first frame has

                self._sampler = LoadSampler(backend)
            except (ImportError, OSError):
                return

    def look(self, now: float) -> "Load | None":
        """How the machine has been since the last look; None where none is due or nothing is known. now: monotonic."""
        if self._sampler is None or now < self._due:
            return None
        self._due = now + LOOK_S
        try:
            return self._sampler.look(self._own())
        except (OSError, RuntimeError):
            self._sampler = None
            return None
