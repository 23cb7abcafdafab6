"""Coming back with mlx-lm's caches: what has dropped entries comes back to its marks, whatever class it is of."""

from typing import Any

import mlx.core as mx
import pytest

from headrace.models.mlx_lm.backend import PrefixCaches
from headrace.models.mlx_lm.cache import MOST, MOST_BYTES, Mark, Marks, MlxLmCache
from headrace.models.mlx_lm.costs import leaves
from headrace.runtime.errors import EngineError

pytestmark = pytest.mark.peer
SIZE = 8


def caches() -> dict[str, Any]:
    from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    return {
        "chunked": [ChunkedKVCache(SIZE), KVCache()],
        "rotating": [RotatingKVCache(max_size=SIZE), KVCache()],
        "nested": [CacheList(ChunkedKVCache(SIZE), KVCache())],
        "recurrent": [ArraysCache(2), KVCache()],
        "recurrent, nested": [CacheList(ArraysCache(2), RotatingKVCache(max_size=SIZE)), QuantizedKVCache(32)],
        "all entries": [KVCache(), CacheList(KVCache(), QuantizedKVCache(32))],
    }


def feed(cache: MlxLmCache, tokens: int, at_once: int = 1) -> None:
    """Append as a model would: every entry holds its position, a state the sum of them. Commit it."""
    while tokens:
        count = min(at_once, tokens)
        new = mx.arange(cache.length, cache.length + count, dtype=mx.float32)[None, None, :, None]
        new = mx.broadcast_to(new, (1, 1, count, 32))
        for part in leaves(cache.parts):
            if not hasattr(part, "update_and_fetch"):
                part[0] = new.sum() + (0 if part[0] is None else part[0])
                part[1] = mx.concatenate([mx.zeros((1, 64)), new[0, 0, -1:]], axis=1)[:, 64:]  # a view of more
                continue
            if hasattr(part, "maybe_trim_front"):
                part.maybe_trim_front()
            part.update_and_fetch(new, new)
        cache.advance(count)
        cache.commit(count)
        tokens -= count


def held(cache: MlxLmCache) -> list[Any]:
    """Return the entries of each part that the next pass attends over, in order of position."""
    found = []
    for part in leaves(cache.parts):
        if not hasattr(part, "update_and_fetch"):
            found.append([part[0].tolist(), part[1].tolist()])
            continue
        keys = part.keys_and_values()[0]
        rows = mx.dequantize(*keys, group_size=32, bits=8) if isinstance(keys, tuple | list) else keys
        found.append([part.offset, sorted(rows[0, 0, :, 0].tolist())[-SIZE:]])
    return found


def made(kind: str) -> MlxLmCache:
    return MlxLmCache(caches()[kind], 64, [])


@pytest.mark.parametrize("kind", ["chunked", "rotating", "nested", "recurrent", "recurrent, nested"])
def test_a_cache_that_drops_entries_is_trimmed_to_marks_only(kind: str) -> None:
    cache = made(kind)
    assert cache.needs_marks
    feed(cache, 2 * SIZE)
    assert cache.reachable(2 * SIZE) == 2 * SIZE
    assert cache.reachable(2 * SIZE - 1) == 0
    before = held(cache)
    with pytest.raises(EngineError, match="dropped"):
        cache.trim(2 * SIZE - 3)
    assert (held(cache), cache.length) == (before, 2 * SIZE)


@pytest.mark.parametrize("kind", list(caches()))
@pytest.mark.parametrize("first", [3, 2 * SIZE])
def test_a_cache_trimmed_to_a_mark_equals_a_new_cache(kind: str, first: int) -> None:
    """From before and after the window is full; twice, since coming back must not spoil the mark."""
    cache = made(kind)
    feed(cache, first, at_once=5)
    cache.mark()
    for more in (1, 3 * SIZE):
        feed(cache, more, at_once=4 if more > 1 else 1)
        assert cache.reachable(first + more - 1) >= first
        cache.trim(first)
        assert (cache.length, cache.committed) == (first, first)
        alone = made(kind)
        feed(alone, first, at_once=5)
        for further in (cache, alone):
            feed(further, 2)
        assert held(cache) == held(alone)
        cache.trim(first)


@pytest.mark.parametrize("kind", list(caches()))
def test_marks_of_caches_that_can_be_trimmed_take_no_memory(kind: str) -> None:
    cache = made(kind)
    feed(cache, 5)
    alone = cache.allocated_bytes
    cache.mark()
    cache.mark()  # the same again
    saved = sum(
        array.nbytes
        for part in leaves(cache.parts)
        if not part.is_trimmable() or hasattr(part, "max_size") or hasattr(part, "chunk_size")
        for array in [getattr(part, "keys", None), getattr(part, "values", None), *getattr(part, "cache", [])]
        if array is not None
    )
    assert cache.allocated_bytes == alone + saved
    assert bool(saved) == cache.needs_marks == (kind != "all entries")


def test_a_mark_keeps_no_base_array_of_its_views() -> None:
    """A convolution's state is a view of all that it was computed from."""
    from mlx_lm.models.cache import ArraysCache

    cache = MlxLmCache([ArraysCache(1)], 64, [])
    before = mx.get_active_memory()
    cache.parts[0][0] = mx.zeros((1, 1 << 18, 4))[:, -3:]
    cache.advance(1)
    cache.commit(1)
    cache.mark()
    cache.parts[0][0] = mx.zeros((1, 3, 4))
    mx.eval(cache.arrays)
    assert mx.get_active_memory() - before < 1 << 18


def test_a_queued_step_is_rolled_back_before_entries_are_dropped() -> None:
    cache = made("chunked")
    feed(cache, 4)
    cache.trim(3)
    feed(cache, 1)
    cache.advance(1)
    for part in cache.parts:
        part.update_and_fetch(mx.zeros((1, 1, 1, 32)), mx.zeros((1, 1, 1, 32)))
    cache.rollback()
    assert (cache.length, [part.offset for part in cache.parts]) == (4, [4, 4])


@pytest.mark.parametrize("length", [-1, 6])
def test_trimming_to_a_longer_length_is_refused(length: int) -> None:
    cache = made("recurrent")
    feed(cache, 5)
    with pytest.raises(ValueError, match="cannot trim"):
        cache.trim(length)
    assert cache.length == 5


def test_gaps_between_marks_shrink_towards_the_end() -> None:
    marks = Marks()
    for length in range(512, 100 * 512, 512):
        marks.add(Mark(length, None, 1))
    lengths = [mark.length for mark in marks]
    gaps = [b - a for a, b in zip([0, *lengths], lengths, strict=False)]
    assert len(lengths) == MOST
    assert lengths[-1] == 99 * 512
    assert gaps[-1] == 512
    assert gaps == sorted(gaps, reverse=True)


def test_marks_are_bounded_in_bytes() -> None:
    marks = Marks()
    for length in range(1, 50):
        marks.add(Mark(length, None, MOST_BYTES // 3))
        assert marks.nbytes <= MOST_BYTES
    assert [mark.length for mark in marks][-2:] == [48, 49]
    marks.add(Mark(50, None, MOST_BYTES + 1))  # too large alone
    assert marks.nbytes == 0
    assert marks.at_most(50) is None


@pytest.mark.parametrize(("more", "num_kept"), [(1, 1), (MOST, 2)])
def test_an_ended_sequence_stays_if_a_longer_one_has_no_mark_at_its_end(more: int, num_kept: int) -> None:
    prefixes = PrefixCaches(10_000, None, can_copy=True)
    first = made("recurrent")
    feed(first, 10)
    prefixes.end(first, range(10), outputs=True)
    longer = first.duplicate()
    for _ in range(more):
        feed(longer, 9, at_once=9)
        longer.mark()
    prefixes.end(longer, range(longer.committed), outputs=True)
    assert longer.reachable(10) == (10 if num_kept == 1 else 0)
    assert len(list(prefixes)) == num_kept
    reused = prefixes.take([*range(10), 1000, 1001])
    assert reused is not None
    assert reused.committed == 10
