"""K/V backend of mlx-lm's caches: one list of mlx-lm's own caches per sequence, and prefix reuse between them.

The engine calls it as any `runtime.kv.backend.KVBackend`. A cache (`cache.MlxLmCache`) can go back to an earlier length
only where its parts have all entries, or a mark: `reachable` says how far.

Guard: tests/models/mlx_lm/test_cache.py.
"""

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx
from msgspec import Struct

from headrace.models.mlx_lm.cache import CachePart, MlxLmCache
from headrace.models.mlx_lm.disk import load_cache, store_cache
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import AttentionSpec, LayersNode, MixerSpec, Projections


class MlxLmPass:
    """One row. The model gets the parts of its cache; its layers append and attend."""

    runs_fused = False

    def __init__(self, rows: Sequence[PassRow]) -> None:
        self.rows = rows
        [row] = rows
        assert isinstance(row.cache, MlxLmCache)
        self._cache = row.cache
        # Draft tokens may be rejected. Recurrent state has no entries to drop, so that from before the pass is kept.
        if self._cache.needs_marks and row.phase == "decode" and row.count > 1:
            self._cache.hold()

    def attend(self, _layer: int, _qkv: Projections, _spec: AttentionSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def mix(self, _layer: int, _x: mx.array, _spec: MixerSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes keep their recurrent state by themselves")

    def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def advance(self) -> None:
        self._cache.advance(self.rows[0].count)

    @property
    def arrays(self) -> list[mx.array]:
        return self._cache.arrays


class EndedSequence(Struct, frozen=True):
    """The cache of an ended sequence, and the tokens of all its entries."""

    cache: MlxLmCache
    tokens: list[int]
    nbytes: int  # allocated when it ended


class PrefixCaches:
    """Caches that prompts can begin with: those of ended sequences, and of running ones up to their prompt.

    Copies share memory until they are written to.
    max_entries: of all ended sequences; the newest is cached whatever its length.
    spare: bytes free for cached sequences beside caches of so many bytes; None for no bound.
    can_copy: False if only an ended sequence's cache itself can go on.
    """

    def __init__(self, max_entries: int, spare: Callable[[int], int] | None, *, can_copy: bool) -> None:
        self._max_entries = max_entries
        self._spare = spare
        self._can_copy = can_copy
        self._ended: list[EndedSequence] = []  # the most recent last
        self._prompts: WeakKeyDictionary[MlxLmCache, list[int]] = WeakKeyDictionary()  # committed, of running ones

    def take(self, prompt: Sequence[int]) -> MlxLmCache | None:
        """Return a cache with the longest available prefix of `prompt`, all tokens but the last at most, or None."""
        wanted = prompt[:-1]
        length = 0
        source: MlxLmCache | EndedSequence | None = None
        for ended in reversed(self._ended):  # of equal lengths, the most recent
            reachable = ended.cache.reachable(common_prefix(ended.tokens, wanted))
            if reachable > length:
                length = reachable
                source = ended
        if self._can_copy:
            for running, tokens in list(self._prompts.items()):
                reachable = running.reachable(common_prefix(tokens, wanted))
                if reachable > length:
                    length = reachable
                    source = running
        if source is None:
            return None
        if isinstance(source, MlxLmCache):
            cache = source.duplicate()
        elif length == len(source.tokens) or not self._can_copy:
            # The prompt goes on with the whole sequence, or nothing but the cache itself can go on.
            self._ended.remove(source)
            cache = source.cache
        else:
            cache = source.cache.duplicate()
        cache.trim(length)
        return cache

    def has(self, prompt: Sequence[int]) -> bool:
        """Return whether an ended sequence has entries of `prompt` only."""
        return any(ended.tokens == list(prompt[: len(ended.tokens)]) for ended in self._ended)

    def add_running(self, cache: MlxLmCache, prompt: Sequence[int]) -> None:
        """Offer the committed entries, of the first of `prompt`, while the cache lives."""
        self._prompts[cache] = list(prompt[: cache.committed])

    def end(self, cache: MlxLmCache, tokens: Sequence[int], *, outputs: bool) -> None:
        """Keep the cache of an ended sequence; its committed entries are of the first of `tokens`.

        outputs: with the output's entries; else with those of a prompt that was offered, if it was.
        """
        prompt = self._prompts.pop(cache, [])
        if not outputs:
            if not prompt:
                return
            cache.trim(cache.reachable(min(len(prompt), cache.committed)))
        if not cache.committed:
            return
        cache.mark()
        committed = list(tokens[: cache.committed])
        # An ended sequence that this one begins with is dropped if this cache can go back to its whole length. A cache
        # with marks may have fewer of them within that length.
        self._ended = [
            ended
            for ended in self._ended
            if ended.tokens != committed[: len(ended.tokens)] or cache.reachable(len(ended.tokens)) != len(ended.tokens)
        ]
        self._ended.append(EndedSequence(cache, committed, cache.allocated_bytes))
        while len(self._ended) > 1 and sum(len(ended.tokens) for ended in self._ended) > self._max_entries:
            del self._ended[0]

    def evict(self) -> None:
        """Drop the oldest ended sequences beyond the spare memory."""
        if self._spare is None:
            return
        # `spare` takes the larger of reserved and allocated bytes. 0: here running sequences count with those reserved.
        while self._ended and sum(ended.nbytes for ended in self._ended) > self._spare(0):
            del self._ended[0]

    def clear(self) -> None:
        """Drop all."""
        self._ended.clear()
        self._prompts.clear()

    def __iter__(self) -> Iterator[EndedSequence]:
        return iter(self._ended)


class MlxLmBackend:
    """Caches of one mlx-lm model.

    Each row is a pass of its own: mlx-lm's caches are those of one sequence.
    options: requirements of the engine.
    make_parts: returns empty caches, one a layer.
    cost: of the model's step, for the bytes of entries.
    rolls_back: the caches can drop their newest entries.
    can_copy: False if a cache's entries belong to that object alone.
    """

    pool = None

    def __init__(
        self,
        options: KVOptions,
        make_parts: Callable[[], list[CachePart]],
        cost: StepCost,
        *,
        rolls_back: bool,
        can_copy: bool = True,
    ) -> None:
        self._options = options
        self._make_parts = make_parts
        self._cost = cost
        self.rolls_back = rolls_back
        self.shares_prefixes = can_copy
        self.copies_to_grow = False
        self._prefixes = PrefixCaches(options.limit, options.spare, can_copy=can_copy)

    def acquire(self, prompt: Sequence[int], _entries: int = 0) -> KVCache:
        return self._prefixes.take(prompt) or self._new_cache()

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, MlxLmCache)
        # With `keep_prefix` all committed entries stay, those of the output included. Else those of the prompt stay for
        # sequences that run meanwhile, until `trim`; none if caches cannot be copied.
        if self._options.keep_prefix or self.shares_prefixes:
            self._prefixes.end(cache, tokens, outputs=self._options.keep_prefix)

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        return [MlxLmPass([row]) for row in rows]

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, MlxLmCache)
        if cache.needs_marks:
            cache.mark()
        self._prefixes.add_running(cache, tokens)

    def evict(self) -> None:
        self._prefixes.evict()

    def trim(self) -> None:
        if not self._options.keep_prefix:
            self._prefixes.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        for prefix in self._prefixes:
            if prefix.tokens == list(tokens[: len(prefix.tokens)]) and not stop():
                store_cache(prefix.cache, prefix.tokens, self._options.key, store)

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        if self.shares_prefixes and not self._prefixes.has(prompt):
            cache = self._new_cache()
            tokens = load_cache(cache, prompt, self._options.key, store)
            if tokens:
                self._prefixes.end(cache, tokens, outputs=True)

    def _new_cache(self) -> MlxLmCache:
        return MlxLmCache(self._make_parts(), self._options.limit, self._cost.kv)

    def clear(self) -> None:
        self._prefixes.clear()
