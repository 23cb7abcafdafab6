"""Memory for the K/V of all sequences, reserved in chunks by the formulas of `runtime.metrics.cost`.

Numbers only: the scheduler reserves before it admits a sequence or lets it append. A preemption and an end release. K/V
backends allocate within these reservations, and cached prefixes get the rest (`spare`).

Guards: tests/runtime/engine/test_scheduler.py, and test_memory_guard.py, which compares them with MLX's own counter.
"""

from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.machine.memory import CACHE_LIMIT, budget
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.units import format_bytes


class KVBudget:
    """Bytes for K/V.

    cost: formulas of bytes by entries, with all networks that draft.
    limit: entries of a sequence, at most; fewer if `total` has no room for so many.
    total: bytes; None for the machine's free memory before the first K/V, less CACHE_LIMIT for passes.

    One sequence can always reserve `limit` entries; their bytes are the minimum of `total`.
    """

    def __init__(self, cost: StepCost, limit: int, total: int | None = None) -> None:
        self._cost = cost
        self._total = total
        self.limit = limit if total is None else cost.longest_context(total, limit)
        self.used = 0  # bytes reserved by all sequences

    @property
    def total(self) -> int:
        if self._total is None:
            machine = budget()
            min_bytes = self._cost.kv_bytes(self.limit)
            self._total = min_bytes if machine is None else max(min_bytes, machine.usable - CACHE_LIMIT)
        return self._total

    def limit_total(self, total: int) -> None:
        """Use at most `total` bytes from now on, or the minimum. Sequences keep what they have reserved."""
        self._total = max(total, self._cost.kv_bytes(self.limit))

    def check(self, prompt: int) -> None:
        """Raise NotEnoughMemoryError, with figures, for a prompt of more tokens than ever fit."""
        if prompt > self.limit:
            raise NotEnoughMemoryError(
                f"not enough memory: the K/V of {prompt:,} tokens takes {format_bytes(self._cost.kv_bytes(prompt))}, "
                f"but {format_bytes(self.total)} may be used",
                f"a prompt of up to {self.limit:,} tokens would fit",
            )

    def reserve(self, sequence: Sequence, entries: int, spare: int = 0) -> bool:
        """Reserve entries, if they fit with `spare` more chunks beside them; return whether they do.

        entries: of the sequence in all, not in addition to those reserved before.
        """
        if entries <= sequence.reserved:
            return True
        entries = min(-(-entries // CHUNK) * CHUNK, self.limit)  # rounded up to whole chunks
        total = self.total  # the free memory is measured here first, before any K/V are allocated
        reserved = self._cost.kv_bytes(sequence.reserved)
        additional = self._cost.kv_bytes(entries) - reserved
        # A sequence that is alone gets its entries in any case: up to `limit` they fit then.
        if self.used > reserved and self.used + additional + spare * self._cost.kv_bytes(CHUNK) > total:
            return False
        self.used += additional
        sequence.reserved = entries
        return True

    def spare(self, allocated: int) -> int:
        """Return the bytes that are neither reserved nor among the caches' `allocated` bytes."""
        return self.total - max(self.used, allocated)

    def release(self, sequence: Sequence) -> None:
        """Release all of the sequence's entries."""
        self.used -= self._cost.kv_bytes(sequence.reserved)
        sequence.reserved = 0
