"""Paged K/V for the native kernels: blocks of one pool, which attention reads in place.

Contract: `KVBackend` and `KVPass`. The decoder (`models/network/decoder.py`) makes this backend on a CPU with native
kernels. A `PagedPass` is a list of block tables and counts; the kernels find entries by them (`runtime.ops.passes`).
tests/runtime/kv/test_paged.py compares with buffers of one sequence, bit for bit.
E = model width, N = tokens of a pass.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import cast

import mlx.core as mx

from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.block_table import BlockTable
from headrace.runtime.kv.cache import KVCache, KVPass, KVShape, PassRow, compute_after
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.kv.pool import BlockPool, make_pool
from headrace.runtime.ops import BLOCK, AttentionSpec, LayersNode, MixerSpec, Ops, Pass, Projections, SequenceRows


class PagedPass:
    """One pass over rows whose caches are block tables of one pool."""

    runs_fused = True

    def __init__(self, rows: Sequence[PassRow]) -> None:
        self.rows = rows
        self._tables = [cast(BlockTable, row.cache) for row in rows]
        for table, row in zip(self._tables, rows, strict=True):
            table.reserve(row.count, row.phase)
        self._storage = self._tables[0].pool.storage
        ends = zip(accumulate(row.count for row in rows), rows, strict=True)
        self._pass = Pass(
            [
                SequenceRows(row.count, table.length, row.phase, table.tables)
                for table, row in zip(self._tables, rows, strict=True)
            ],
            self._storage.store,
            wanted=max((end for end, row in ends if row.output), default=0),
        )
        self._previous = self._storage.newest  # of the pass before, until the first layer's input depends on it
        self._recurrent = self._storage.shape.recurrent

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """Append and attend. qkv: projections of (1, N) tokens -> (1, N, H * D)."""
        qkv = compute_after(qkv, self._previous)
        self._previous = None
        out = self._storage.ops.attend_pass(qkv, self._pass, layer, spec)
        if spec.appends:
            self._storage.newest = out
        return out

    def mix(self, layer: int, x: mx.array, spec: MixerSpec) -> mx.array:
        """x (1, N, projected) -> (1, N, Hv * Dv)."""
        index = self._recurrent.index(layer)
        states = [table.states[index] for table in self._tables]
        out, after = self._storage.ops.mix_pass(x, states, [row.count for row in self.rows], spec)
        self._replace(index, after, x)
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        """x (1, N, E) -> (1, wanted, E)."""
        shape = self._storage.shape
        wanted = self._pass.rows
        if layers.stop == shape.layers or (not self._pass.wanted and layers.stop == shape.num_appending_layers):
            wanted = self._pass.wanted
        # Recurrent layers are counted by themselves: those from `first` on, up to `last`, are in this range of layers.
        first, last = (bisect_left(self._recurrent, layer) for layer in (layers.start, layers.stop))
        states = [[table.states[index] for table in self._tables] for index in range(first, last)]
        num_decoded = 0  # rows whose mixers' inputs are returned, for a rollback
        if states:
            num_decoded = sum(row.count for row in self.rows if row.phase == "decode")
        x = compute_after(x, self._previous)
        self._previous = None
        x, *made = node.run_pass(x, self._pass, layers, states, num_decoded, wanted)
        if layers.start < shape.num_appending_layers:
            self._storage.newest = x
        # For each recurrent layer: a state of every sequence, then the inputs if there are decode rows.
        rest = iter(made)
        for index in range(first, last):
            after = list(islice(rest, len(self._tables)))
            inputs = next(rest) if num_decoded else None
            self._replace(index, after, inputs)
        return x

    def _replace(self, index: int, after: Sequence[mx.array], inputs: mx.array | None) -> None:
        """Replace the states of a recurrent layer. inputs (1, .., projected): of its mixer, decode rows first."""
        row = 0
        for table, state, pass_row in zip(self._tables, after, self.rows, strict=True):
            if pass_row.phase == "decode" and inputs is not None:
                table.keep_inputs(index, inputs, slice(row, row + pass_row.count))
            table.states[index] = state
            row += pass_row.count

    def advance(self) -> None:
        for table, row in zip(self._tables, self.rows, strict=True):
            table.advance(row.count)

    @property
    def arrays(self) -> list[mx.array]:
        return self._storage.arrays + [state for table in self._tables for state in table.states]


class PagedBackend:
    """Block tables of one pool, which is replaced after an error."""

    rolls_back = True
    shares_prefixes = True
    copies_to_grow = False

    def __init__(self, shape: KVShape, ops: Ops, options: KVOptions) -> None:
        self._shape = shape
        self._ops = ops
        self._options = options
        self.pool = self._new_pool()

    def acquire(self, prompt: Sequence[int], _entries: int = 0) -> BlockTable:
        table = BlockTable(self.pool, self._options.limit)
        table.load_prefix(prompt[:-1], answers=self._options.keep_prefix)
        return table

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, BlockTable)
        if self._options.keep_prefix:
            cache.cache_blocks(tokens, end=True)
        cache.close()

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        return [PagedPass(rows)]

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, BlockTable)
        cache.cache_blocks(tokens)

    def evict(self) -> None:
        """Do nothing: allocation evicts cached blocks as needed."""

    def trim(self) -> None:
        if self._options.keep_prefix:
            self.pool.free_slabs()
        else:
            self.pool.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        store_blocks(self.pool, tokens, store, stop)

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        load_blocks(self.pool, prompt, store)

    def clear(self) -> None:
        self.pool.evict_all()
        self.pool = self._new_pool()

    def _new_pool(self) -> BlockPool:
        options = self._options
        entries = options.max_running * (options.limit + BLOCK)  # a block more each, to copy a shared one
        return make_pool(PagedArrays(self._shape, self._ops), entries, options.key, options.limit)
