"""The KV cache against a plain list: whatever is reserved, appended, committed, rolled back or trimmed."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from headrace.runtime.errors import ContextLimitError
from headrace.runtime.kv.cache import CHUNK, KVCache, KVShape
from headrace.runtime.kv.slot_cache import GROWTH, SlotCache
from headrace.runtime.metrics.cost import BESIDE_WINDOW, ROLLBACK, LayerKV, held_bytes, longest_context
from headrace.runtime.ops import AttentionSpec, Ops, reference
from headrace.runtime.ops.kv_format import FLOAT32, plain
from tests.support.kernels import FAST

LAYERS = 2
KV_HEADS = 2
DIM = 16
LIMIT = 700
SPEC = AttentionSpec(heads=2, kv_heads=KV_HEADS, head_dim=DIM, scale=0.5)
WINDOW = 9
ROW_BYTES = 2 * KV_HEADS * DIM * 4
Windows = tuple[int | None, ...]


def new_cache(
    limit: int = LIMIT, dtype: mx.Dtype = mx.float32, ops: Ops = reference, windows: Windows = ()
) -> SlotCache:
    return SlotCache(KVShape(LAYERS, KV_HEADS, DIM, plain(dtype), windows), ops, limit)


def projections(ids: list[int], layer: int) -> mx.array:
    """q, k, v rows for entries named `ids`: zero queries, keys +id, values -id, shifted by 1000 per layer."""
    names = mx.array(ids, mx.float32)[:, None] + 1000 * layer
    q = mx.zeros((len(ids), 2 * DIM))
    k = mx.broadcast_to(names, (len(ids), KV_HEADS * DIM))
    return mx.concatenate([q, k, -k], axis=-1)[None]  # (1, T, (H + 2 Hkv) * D)


class CacheMachine(RuleBasedStateMachine):
    """`entries` and `committed` are what the cache should hold; an entry is its name."""

    ops: Ops = reference
    limit = LIMIT
    windows: Windows = (None, None)

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache(self.limit, ops=self.ops, windows=self.windows)
        self.specs = [replace(SPEC, window=window) for window in self.windows]
        self.entries: list[int] = []
        self.committed = 0
        self.next_name = 1
        self.copied = 0

    def _append(self, count: int, look: bool = True) -> None:
        names = list(range(self.next_name, self.next_name + count))
        self.next_name += count
        before = self.cache.capacity
        self.cache.reserve(count)
        self.copied += before if self.cache.capacity != before else 0
        out = mx.zeros(())
        for layer in range(LAYERS):
            qkv = mx.depends(projections(names, layer), out)  # as a network's layers follow from one another
            out = self.cache.attend(layer, [qkv], self.specs[layer])
            if not look:
                continue  # nobody computes what comes out: the entries have to be there all the same
            # Zero queries weigh all visible values alike: the last one sees the mean of everything in its window.
            seen = [*self.entries, *names][-(self.windows[layer] or 0) :]
            mean = -(sum(seen) / len(seen) + 1000 * layer)
            assert out[0, -1].tolist() == pytest.approx([mean] * 2 * DIM, rel=1e-4)
        self.cache.advance(count)
        self.entries += names

    @rule(count=st.one_of(st.just(1), st.integers(1, 300)), look=st.booleans())
    def append(self, count: int, look: bool) -> None:
        if len(self.entries) + count <= self.limit:
            self._append(count, look)
            return
        self.cache.reserve(count)
        with pytest.raises(ContextLimitError):
            self.cache.advance(count)

    @rule(count=st.integers(0, 400))
    def reserve_only(self, count: int) -> None:
        before = self.cache.capacity
        self.cache.reserve(count)
        self.copied += before if self.cache.capacity != before else 0

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.entries) - self.committed))
        self.cache.commit(count)
        self.committed += count

    @rule(extra=st.integers(1, 5))
    def commit_too_much(self, extra: int) -> None:
        with pytest.raises(ValueError, match="cannot commit"):
            self.cache.commit(len(self.entries) - self.committed + extra)

    @rule()
    def rollback(self) -> None:
        self.cache.rollback()
        del self.entries[self.committed :]

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, self.committed))
        if length and not self.cache.reachable(length):
            with pytest.raises(ValueError, match="has dropped"):
                self.cache.trim(length)
            return
        self.cache.trim(length)
        del self.entries[length:]
        self.committed = length

    @precondition(lambda self: self.committed < self.limit)
    @rule(extra=st.integers(1, 5))
    def trim_to_more_than_there_is(self, extra: int) -> None:
        with pytest.raises(ValueError, match="cannot trim"):
            self.cache.trim(self.committed + extra)

    @invariant()
    def lengths_agree(self) -> None:
        cache = self.cache
        assert (cache.length, cache.committed) == (len(self.entries), self.committed)
        assert cache.capacity >= cache.length
        assert all(array.shape[2] % CHUNK == 0 for array in cache.arrays)
        rows = sum(self.committed - min(self.committed, first) for first in cache.firsts)
        assert cache.committed_bytes == rows * ROW_BYTES
        assert cache.allocated_bytes == sum(array.nbytes for array in cache.arrays)

    @invariant()
    def contents_agree(self) -> None:
        for layer in range(LAYERS):
            names = [name + 1000.0 * layer for name in self.entries[self.cache.firsts[layer] :]]
            keys = self.cache.arrays[layer]
            values = self.cache.arrays[LAYERS + layer]
            assert keys[0, 1, : len(names), 2].tolist() == names
            assert values[0, 0, : len(names), 3].tolist() == [-name for name in names]

    @invariant()
    def growing_copied_no_more_than_a_doubling_cache_does(self) -> None:
        assert self.windows != (None, None) or self.copied <= 2 * self.cache.capacity


CacheMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestKVCache = CacheMachine.TestCase


class WindowedMachine(CacheMachine):
    """One layer sees WINDOW entries: it keeps those, and what going back takes; the other keeps everything."""

    limit = 2500
    windows = (None, WINDOW)

    @invariant()
    def what_is_kept_is_enough(self) -> None:
        full, windowed = self.cache.firsts
        assert full == 0
        assert windowed <= max(0, self.committed - WINDOW + 1)
        assert self.committed == 0 or self.cache.reachable(self.committed) == self.committed


WindowedMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestWindowedKVCache = WindowedMachine.TestCase


class FastCacheMachine(CacheMachine):
    """With the kernels that write in place, where they were built."""

    ops = FAST


FastCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestFastKVCache = FastCacheMachine.TestCase


def test_growing_copies_less_than_a_hundredth_of_the_bytes_read() -> None:
    cache = new_cache(limit=50_000)
    copied = 0
    read = 0
    total = 50_000
    for _ in range(total):
        before = cache.capacity
        cache.reserve(1)
        copied += before if cache.capacity != before else 0
        assert cache.capacity <= cache.length + 1 + GROWTH
        cache.advance(1)
        read += cache.length
    assert copied < read / 100
    assert cache.capacity < total + CHUNK  # the limit bounds the last growth


@pytest.mark.parametrize("start", [CHUNK, 4 * GROWTH])
def test_growing_allocates_one_buffer_at_a_time(start: int) -> None:
    layers = 16
    cache = SlotCache(KVShape(layers, 2, 64, FLOAT32), reference, 16 * GROWTH)
    cache.reserve(start)
    mx.eval(cache.arrays)
    mx.clear_cache()
    others = mx.get_active_memory() - cache.allocated_bytes
    mx.reset_peak_memory()
    cache.reserve(start + 1)
    buffer = cache.allocated_bytes // (2 * layers)
    assert mx.get_peak_memory() - others <= cache.allocated_bytes + 2 * buffer
    assert mx.get_active_memory() - others == pytest.approx(cache.allocated_bytes, abs=4096)
    assert mx.get_cache_memory() <= buffer + 4096  # the device's thread may free the last one late, and scalars with it


@pytest.mark.parametrize("chunk", [1, 100, 512])
def test_a_windowed_cache_keeps_the_window_and_the_entries_for_rollback(chunk: int) -> None:
    cache = new_cache(limit=20_000, windows=(None, 700))
    kv = [LayerKV(1, 4 * DIM * 4), LayerKV(1, 4 * DIM * 4, 700)]
    while cache.length < 12_000:
        cache.reserve(chunk)
        cache.advance(chunk)
        cache.commit(chunk)
        assert cache.reachable(cache.committed - min(cache.committed, ROLLBACK)) or cache.committed <= ROLLBACK
    assert cache.reachable(cache.committed - 2000) == 0
    full, windowed = (array.shape[2] for array in cache.arrays[:2])
    assert full >= 12_000
    assert windowed <= -(-(700 + BESIDE_WINDOW) // CHUNK) * CHUNK
    assert cache.committed_bytes < held_bytes(kv, cache.committed) < cache.allocated_bytes
    with pytest.raises(ValueError, match="has dropped"):
        cache.trim(cache.committed - 2000)
    cache.trim(0)
    assert cache.firsts == [0, 0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9000), st.none() | st.integers(1, 5000)), max_size=3),
       st.integers(-5, 10**9), st.integers(1, 10**6))  # fmt: skip
def test_the_longest_context_fits_and_one_more_does_not(
    layers: list[tuple[int, int, int | None]], room: int, most: int
) -> None:
    kv = [LayerKV(*layer) for layer in layers]
    tokens = longest_context(kv, room, most)
    assert held_bytes(kv, tokens) <= max(room, 0)
    assert tokens == most or held_bytes(kv, tokens + 1) > room


def test_no_memory_is_reserved_in_advance() -> None:
    cache = new_cache()
    assert (cache.capacity, cache.allocated_bytes, cache.committed_bytes) == (0, 0, 0)
    cache.reserve(1)
    assert cache.capacity == CHUNK


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bytes_follow_the_dtype(dtype: mx.Dtype) -> None:
    cache = new_cache(dtype=dtype)
    cache.reserve(3)
    cache.attend(0, [projections([1, 2, 3], 0).astype(dtype)], SPEC)
    assert cache.allocated_bytes == CHUNK * 2 * LAYERS * KV_HEADS * DIM * dtype.size
    assert {array.dtype for array in cache.arrays} == {dtype}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_cache_without_room_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        KVCache(limit)
