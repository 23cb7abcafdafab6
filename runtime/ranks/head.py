"""A multi-token prediction head that several ranks divide: rank 0's calls, and followers that repeat them.

`LeaderHead` and `_HeadCaches` log calls after "head"; `FollowerHead` has a method for each, with its arguments in that
order. `MtpDraft` (`runtime/engine/draft_networks.py`) uses a divided head like any other.

Contract: a pass of the head, and its logits, are handed to the device at once and in one order on every rank.

Guard: tests/models/network/test_ranks.py.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
from msgspec.structs import replace

from headrace.runtime.errors import EngineError
from headrace.runtime.kv.backend import KVBackend, KVOptions, one_pass
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.network import DraftHead
from headrace.runtime.ops import Phase
from headrace.runtime.ranks.leader import Leader, LeaderCache, cache_of


class LeaderHead:
    """A `DraftHead` of one rank's part, whose passes the followers repeat. All else is the head's own."""

    def __init__(self, head: DraftHead, leader: Leader) -> None:
        self._head = head
        self._leader = leader
        self._numbers = count()  # of caches, one a sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def kv_backend(self, options: KVOptions) -> KVBackend:
        """Return a backend for one cache, which begins empty."""
        backend = self._head.kv_backend(options)
        return _HeadCaches(backend, self._leader, next(self._numbers), options.limit)

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass) -> mx.array:
        """See `DraftHead`."""
        self._leader.flush()  # `make_passes` has logged the pass
        out = self._head.hidden(tokens, hidden, kv)
        mx.async_eval(out)
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        """See `DraftHead`. hidden: of the newest pass; the followers have their own."""
        self._leader.log("head", "logits")
        self._leader.flush()
        out = self._head.logits(hidden)
        mx.async_eval(out)
        return out


class _HeadCaches:
    """The backend of one sequence's cache, which the followers have, too, under `number`."""

    def __init__(self, backend: KVBackend, leader: Leader, number: int, limit: int) -> None:
        self._backend = backend
        self._leader = leader
        self._number = number
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def acquire(self, prompt: Sequence[int], entries: int = 0) -> KVCache:
        self._leader.log("head", "acquire", self._number, self._limit)
        inner = self._backend.acquire(prompt, entries)
        return cast(KVCache, LeaderCache(inner, self._number, self._leader, [], ("head",)))

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        [row] = rows
        cache = cache_of(row).inner
        passes = self._backend.make_passes([replace(row, cache=cache)])
        # Logged once it is made: followers make the pass and run it in one call, so none may follow one that failed.
        self._leader.log("head", "hidden", self._number, cache.length, row.count, row.phase)
        return passes


class DividedHead(Protocol):
    """A rank's part of a head."""

    @property
    def cost(self) -> StepCost:
        """See `DraftHead`."""
        ...

    def kv_backend(self, options: KVOptions, /) -> KVBackend:
        """See `DraftHead`."""
        ...

    def follow_head(self, tokens: int, kv: KVPass, /) -> mx.array:
        """Run rank 0's pass over so many tokens; return the hidden states (1, T, E)."""
        ...

    def logits(self, hidden: mx.array, /) -> mx.array:
        """See `DraftHead`."""
        ...


class _HeadCache(NamedTuple):
    """One sequence's K/V of the head."""

    backend: KVBackend
    cache: KVCache


class FollowerHead:
    """A follower's part of the head, and its caches. Every method is a call of `LeaderHead` or its caches."""

    def __init__(self, head: DividedHead) -> None:
        self._head = head
        self._caches: dict[int, _HeadCache] = {}  # by rank 0's number
        self._newest: mx.array  # hidden states (1, T, E)

    def acquire(self, number: int, limit: int) -> None:
        """Make the cache of a sequence.

        number: as rank 0 counts its caches.
        limit: entries at most.
        """
        backend = self._head.kv_backend(KVOptions(limit))
        self._caches[number] = _HeadCache(backend, backend.acquire(()))

    def hidden(self, number: int, length: int, tokens: int, phase: Phase) -> mx.array:
        """Return what to evaluate. Raises EngineError if this rank's entries are not rank 0's."""
        backend, cache = self._caches[number]
        if cache.length != length:
            raise EngineError(f"this rank has {cache.length} entries of a prediction head, rank 0 {length}")
        kv_pass = one_pass(backend, cache, tokens, phase)
        self._newest = self._head.follow_head(tokens, kv_pass)
        kv_pass.advance()
        return self._newest

    def logits(self) -> mx.array:
        """Return what to evaluate."""
        return self._head.logits(self._newest)

    def commit(self, number: int, tokens: int) -> None:
        self._caches[number].cache.commit(tokens)

    def rollback(self, number: int) -> None:
        if number in self._caches:  # else cleared, after an error
            self._caches[number].cache.rollback()

    def close(self, number: int) -> None:
        if number in self._caches:  # else cleared, after an error
            self._caches.pop(number).cache.close()

    def clear(self) -> None:
        """Drop all caches."""
        self._caches.clear()
