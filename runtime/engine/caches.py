"""Where the caches of sequences come from, and what stays of them for prompts that begin alike.

Contract: `begin` gives a cache whose committed entries are the first tokens of a prompt, at most all but the last,
which the first step feeds. `fed` is told of each chunk of a prompt that is committed, `end` gets the cache back with
the tokens that went in. In between the cache belongs to its sequence: if that fails, `clear` forgets everything.

keep: a conversation. What was said stays for the next prompt, also beyond the last sequence, and answers are gone on
from as they were said. Without, only what is the same bit for bit as a cold start is found, and nothing outlives the
work at hand.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.runtime.kv.cache import Cache
from headrace.runtime.kv.paged_cache import KVPool, PagedCache
from headrace.runtime.kv.prefix import Prefix
from headrace.runtime.kv.slot_cache import SlotCache, SlotPool
from headrace.runtime.network import Network
from headrace.runtime.ops import BLOCK


class Caches(Protocol):
    """What the engine asks for."""

    @property
    def pool(self) -> KVPool | None:
        """Of whose blocks they are: then one sequence's chunks are there for others as soon as they are fed."""
        ...

    def begin(self, prompt: Sequence[int]) -> Any:
        """A cache for one sequence, with what there is of its prompt."""
        ...

    def fed(self, cache: Any, tokens: Sequence[int]) -> None:
        """The committed entries are of the first of `tokens`, all of them a prompt's; nothing is pending."""
        ...

    def end(self, cache: Any, tokens: Sequence[int]) -> None:
        """Nothing more is appended to the cache; its committed entries are of the first of `tokens`."""
        ...

    def give_way(self) -> None:
        """Sequences were promised memory: give up what is kept beside their caches and does not fit any more."""
        ...

    def rest(self) -> None:
        """There is no sequence left: give back what is not to be kept."""
        ...

    def clear(self) -> None:
        """Forget everything, as nothing is to be trusted after an error."""
        ...


def make_caches(
    network: Network[Any],
    limit: int,
    most_running: int,
    keep: bool,
    key: bytes = b"",
    spare: Callable[[int], int] | None = None,
) -> Caches:
    """In blocks of one pool, where the network has one. limit: entries of a sequence, at most; key: see `BlockPool`.

    spare: see `SlotSlabs`.
    """

    def make_pool() -> Any:
        pool = network.make_pool(most_running * (limit + BLOCK), limit, key)  # never full: `Room` is tighter
        if isinstance(pool, SlotPool) and spare is not None:
            pool.slabs.spare = spare
        return pool

    pool = make_pool()
    if isinstance(pool, SlotPool):
        return Slots(pool, make_pool, limit, keep)
    return OwnBuffers(network, limit, keep) if pool is None else Pooled(pool, make_pool, limit, keep)


class Pooled:
    """Blocks of a pool: what several begin with is there once."""

    def __init__(self, pool: KVPool, make_pool: Callable[[], KVPool], limit: int, keep: bool) -> None:
        self.pool = pool
        self._make_pool = make_pool
        self._limit = limit
        self._keep = keep

    def begin(self, prompt: Sequence[int]) -> PagedCache:
        cache = self.pool.make_cache(self._limit)
        cache.resume(prompt[:-1], answers=self._keep)
        return cache

    def fed(self, cache: PagedCache, tokens: Sequence[int]) -> None:
        cache.publish(tokens)

    def end(self, cache: PagedCache, tokens: Sequence[int]) -> None:
        if self._keep:
            cache.publish(tokens, end=True)
        cache.close()

    def give_way(self) -> None:
        """Blocks that nobody holds are given up where one is needed."""

    def rest(self) -> None:
        if self._keep:
            self.pool.give_back()
        else:
            self.pool.clear()

    def clear(self) -> None:
        self.pool = self._make_pool()


class Slots:
    """Each sequence has buffers of its own, and what several begin with is in blocks of a pool as well.

    The buffers of the last one outlive it while it was alone: there may be no memory for blocks beside them.
    """

    def __init__(self, pool: SlotPool, make_pool: Callable[[], SlotPool], limit: int, keep: bool) -> None:
        self.pool = pool
        self._make_pool = make_pool
        self._limit = limit
        self._keep = keep
        self._last = Prefix()

    def begin(self, prompt: Sequence[int]) -> SlotCache:
        found = self.pool.blocks.lookup(prompt[:-1], answers=self._keep).length
        cache = self._last.take(prompt)
        if isinstance(cache, SlotCache) and cache.committed >= found:
            return cache
        del cache  # its memory is needed
        slot = self.pool.make_slot(self._limit)
        slot.resume(prompt[:-1], answers=self._keep)
        return slot

    def fed(self, cache: SlotCache, tokens: Sequence[int]) -> None:
        cache.publish(tokens)

    def end(self, cache: SlotCache, tokens: Sequence[int]) -> None:
        if self._keep:
            cache.publish(tokens, end=True)
        if self._keep and len(self.pool.slabs.slots) == 1:
            cache.leave()
            self._last.keep(cache, tokens)
        else:
            cache.close()

    def give_way(self) -> None:
        self.pool.give_way()

    def rest(self) -> None:
        if not self._keep:
            self.pool.clear()

    def clear(self) -> None:
        self._last.clear()
        self.pool = self._make_pool()


class OwnBuffers:
    """Each sequence has buffers of its own, and at most one outlives its sequence."""

    pool = None

    def __init__(self, network: Network[Any], limit: int, keep: bool) -> None:
        self._network = network
        self._limit = limit
        self._kept = Prefix() if keep else None

    def begin(self, prompt: Sequence[int]) -> Cache:
        cache = self._kept.take(prompt) if self._kept else None
        return cache or self._network.make_cache(self._limit)

    def fed(self, cache: Cache, _tokens: Sequence[int]) -> None:
        if self._kept and cache.needs_marks:
            cache.mark()

    def end(self, cache: Cache, tokens: Sequence[int]) -> None:
        if self._kept:
            self._kept.keep(cache, tokens)

    def give_way(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def clear(self) -> None:
        if self._kept:
            self._kept.clear()
