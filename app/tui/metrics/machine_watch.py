"""Machine load, sampled every two seconds once a model is loaded.

Without psutil, or without permission to read, there are no samples.

Guard: tests/tui/decode/test_machine.py.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.runtime.machine.load_sampler import LoadSampler
    from headrace.runtime.machine.machine_load import MachineLoad

SAMPLE_S = 2.0  # between two samples


class MachineWatch:
    """`begin` once the backend is known, then `sample_if_due` at any interval."""

    def __init__(self, own_pids: Callable[[], Sequence[int]]) -> None:
        """own_pids: the processes of this program at this moment."""
        self._own_pids = own_pids
        self._sampler: LoadSampler | None = None  # None before `begin`, and after it failed
        self._due = 0.0  # monotonic clock of the next sample

    def begin(self, backend: str) -> None:
        """Start sampling for this backend."""
        if self._sampler is None:
            try:
                # Imported late, as psutil takes 30 ms: the first frame does not wait for it.
                from headrace.runtime.machine.load_sampler import LoadSampler

                self._sampler = LoadSampler(backend)
            except (ImportError, OSError):
                return

    def sample_if_due(self, now: float) -> "MachineLoad | None":
        """Return the load since the last sample; None if none is due or known. now: monotonic seconds."""
        if self._sampler is None or now < self._due:
            return None
        self._due = now + SAMPLE_S
        try:
            return self._sampler.sample(self._own_pids())
        except (OSError, RuntimeError):
            self._sampler = None
            return None
