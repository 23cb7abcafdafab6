"""Memory for the K/V of all sequences, reserved in chunks by the formulas of `runtime.metrics.cost`."""

from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.machine.memory import budget
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.units import format_bytes


class Room:
    """Bytes for K/V. total: None for what the machine has free when a second sequence first asks.

    One sequence always has room for `limit` entries, whose bytes are then the least there is.
    """

    def __init__(self, cost: StepCost, limit: int, total: int | None = None) -> None:
        self._cost = cost
        self._total = total
        self.limit = limit if total is None else cost.longest_context(total, limit)
        self.used = 0

    @property
    def total(self) -> int:
        if self._total is None:
            machine = budget()
            least = self._cost.kv_bytes(self.limit)
            self._total = least if machine is None else max(least, self.used + machine.usable)
        return self._total

    def check(self, prompt: int) -> None:
        """Raises NotEnoughMemoryError for a prompt of so many tokens that would never have room, with figures."""
        if prompt > self.limit:
            raise NotEnoughMemoryError(
                f"not enough memory: the K/V of {prompt:,} tokens takes {format_bytes(self._cost.kv_bytes(prompt))}, "
                f"but {format_bytes(self.total)} may be used",
                f"a prompt of up to {self.limit:,} tokens would fit",
            )

    def promise(self, sequence: Sequence, entries: int, spare: int = 0) -> bool:
        """Whether the sequence may have so many entries, with room for `spare` more pieces beside it."""
        if entries <= sequence.promised:
            return True
        entries = min(-(-entries // CHUNK) * CHUNK, self.limit)
        held = self._cost.kv_bytes(sequence.promised)
        more = self._cost.kv_bytes(entries) - held
        if self.used > held and self.used + more + spare * self._cost.kv_bytes(CHUNK) > self.total:
            return False
        self.used += more
        sequence.promised = entries
        return True

    def spare(self, taken: int) -> int:
        """Bytes that nothing is promised of, nor among the `taken` ones of caches."""
        return self.total - max(self.used, taken)

    def release(self, sequence: Sequence) -> None:
        """The sequence's cache is gone."""
        self.used -= self._cost.kv_bytes(sequence.promised)
        sequence.promised = 0
