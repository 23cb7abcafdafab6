"""Followers, the ranks from 1 on: they repeat rank 0's calls on their own part of the model, and do nothing else.

Every public method of `_Repeated` is named like a call that `runtime.ranks.leader` logs, with its arguments in that
order; so a call is added in both files. A call that answers sends one record (`Leader.answers` waits for it).
tests/app/hosts/ has real ranks, tests/runtime/ranks/ the parts.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.errors import EngineError, PoolFullError
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ranks.head import DividedHead, FollowerHead
from headrace.runtime.ranks.peer_connection import PeerConnection, RankLostError, Record, connect

TOLD_S = 1.0  # between two reports of kernel times to rank 0: as often as people read them


class FollowerNetwork(Protocol):
    """A rank's part of a model."""

    @property
    def cost(self) -> StepCost: ...

    @property
    def draft_head(self) -> DividedHead | None: ...

    def kv_backend(self, options: KVOptions, /) -> KVBackend: ...

    def follow(self, kv: KVPass, /) -> list[mx.array]:
        """Run rank 0's pass on this part; return what to evaluate."""
        ...


class Follower:
    """The connection to rank 0. The process ends when rank 0 is lost, after `on_lost`.

    address, rank, key, timeout: see `connect`.
    end: ends the process with an exit code.
    """

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        key: bytes,
        timeout: float = 5.0,
        on_lost: Callable[[RankLostError], None] = lambda _error: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        def lose(reason: str) -> None:
            # On a thread of the connection. It ends the process, as the main thread may wait in a collective, which
            # nothing interrupts.
            with suppress(Exception):
                on_lost(RankLostError(f"rank 0 {reason}"))
            end(1)

        self.address, _ = address  # rank 0's
        self.link = PeerConnection(connect(address, rank, key, timeout), "rank 0", lose)
        self.link.start()

    def take(self) -> Record | None:
        """Return rank 0's next record; None at the end, also at one because of another rank."""
        record = self.link.take()
        if record is None or "end" in record:
            return None
        return record


def follow(network: FollowerNetwork, follower: Follower) -> Record | None:
    """Repeat rank 0's calls. Return the first record of another kind; None at the end.

    Raises EngineError if this rank's state differs from rank 0's.
    """
    repeated = _Repeated(network, follower.link)
    while (record := follower.take()) is not None and "calls" in record:
        for name, *arguments in record["calls"]:
            getattr(repeated, name)(*arguments)
    mx.synchronize()  # rank 0 may still wait for this rank's part of the newest pass
    return record


class _Repeated:
    """K/V state of this rank. Every public method is a call of `runtime.ranks.leader`."""

    def __init__(self, network: FollowerNetwork, link: PeerConnection) -> None:
        self._network = network
        self._link = link
        self._backend: KVBackend  # set by `backend`, rank 0's first call
        self._caches: dict[int, KVCache] = {}  # by rank 0's number
        self._tokens: dict[int, list[int]] = {}  # of each cache's sequence, as far as rank 0 has sent them
        self._passes: deque[KVPass] = deque()  # made, and not run yet
        self._head: FollowerHead | None = None
        if network.draft_head is not None:
            self._head = FollowerHead(network.draft_head)
        self._clock = _KernelClock(link)

    def backend(self, limit: int, max_running: int, keep_prefix: bool) -> None:
        self._drop()
        self._backend = self._network.kv_backend(KVOptions(limit, max_running, keep_prefix))
        self._link.send({"marks": self._backend.acquire(()).needs_marks})

    def acquire(self, number: int, tokens: list[int], end: int, entries: int, marks: bool) -> None:
        """Make or reuse a cache, and answer with the entries that it has.

        number: as rank 0 counts its caches.
        tokens: of the sequence; the first `end` may be in the cache.
        entries: reserved for the sequence.
        marks: the cache needs marks (`KVCache.needs_marks`).
        """
        self._tokens[number] = tokens  # also those after `end`: `release` and `on_prefill` send only newer ones
        cache = self._backend.acquire(tokens[:end], entries)
        cache.needs_marks = marks
        self._caches[number] = cache
        self._link.send({"found": cache.committed})

    def release(self, number: int, newer: list[int]) -> None:
        self._backend.release(self._caches.pop(number), self._tokens.pop(number) + newer)

    def commit(self, number: int, tokens: int) -> None:
        self._caches[number].commit(tokens)

    def rollback(self, number: int) -> None:
        self._caches[number].rollback()

    def close(self, number: int) -> None:
        self._tokens.pop(number, None)
        self._caches.pop(number).close()

    def on_prefill(self, number: int, newer: list[int]) -> None:
        self._tokens[number] += newer
        self._backend.on_prefill(self._caches[number], self._tokens[number])

    def passes(self, groups: list[list[list[Any]]]) -> None:
        """Make a step's passes. groups: of each pass, its rows as `_row_arguments` of rank 0 sends them."""
        rows_of_passes = [[self._row(*row) for row in group] for group in groups]
        self._passes.clear()  # some are left of a step that failed on rank 0, as for a full pool
        with suppress(PoolFullError):  # rank 0 has raised it, too
            for rows in rows_of_passes:
                self._passes += self._backend.make_passes(rows)
        self._clock.ran(decodes=all(row.phase == "decode" for rows in rows_of_passes for row in rows))

    def _row(self, number: int, length: int, *fields: Any) -> PassRow:
        """Return a row of this rank's cache.

        number, length: of rank 0's cache. Raises EngineError if this rank's has another length.
        fields: the others of `PassRow`.
        """
        cache = self._caches[number]
        if cache.length != length:
            raise EngineError(f"this rank has {cache.length} entries of a sequence, rank 0 {length}")
        return PassRow(cache, *fields)

    def run(self) -> None:
        kv = self._passes.popleft()  # rank 0 runs them in this order
        # Not waited for, so that the next calls are read meanwhile. The device computes passes in this order, too.
        mx.async_eval(self._network.follow(kv))

    def head(self, name: str, *arguments: object) -> None:
        result = getattr(self._head, name)(*arguments)
        if result is not None:
            mx.async_eval(result)

    def evict(self) -> None:
        self._backend.evict()

    def trim(self) -> None:
        # `clear_cache` waits for the device with the interpreter lock held, which would stop this rank's heartbeats.
        mx.synchronize()
        self._backend.trim()
        mx.clear_cache()

    def clear(self) -> None:
        self._drop()
        self._backend.clear()
        self._link.send({"cleared": True})

    def _drop(self) -> None:
        for table in (self._caches, self._tokens, self._passes, self._head):
            if table is not None:
                table.clear()


class _KernelClock:
    """Tells rank 0 the seconds that this rank's kernels compute in a decode step, about every TOLD_S."""

    def __init__(self, link: PeerConnection) -> None:
        self._link = link
        self._measures = ops.select() is ops.native  # other operations have no clocks
        self._restart()

    def ran(self, *, decodes: bool) -> None:
        """Count a step that is about to run. The kernels' clocks show those before it.

        decodes: it has no rows of prompts. A step with some begins the measurement anew.
        """
        if not self._measures:
            return
        if not decodes:
            self._restart()
        elif self._steps and time.monotonic() - self._began >= TOLD_S:
            times = ops.native.region_times().values()
            computing_ns = sum(of_kind.wall_ns - of_kind.waiting_ns for of_kind in times)
            self._link.send({"times": computing_ns / self._steps / 1e9})
            self._restart()
        self._steps += decodes

    def _restart(self) -> None:
        self._steps = 0
        self._began = time.monotonic()
        if self._measures:
            ops.native.measure_regions(True)
