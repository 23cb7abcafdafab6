"""Paged K/V for the native kernels: blocks of one pool, which attention reads in place.

    PagedBackend -> BlockTable   of one sequence: the block of each BLOCK entries, in every layer group
                 -> PagedPass    a list of block tables and counts, by which the kernels find entries (`runtime.ops`)

Contract: `KVBackend`, `KVCache` and `KVPass`. The decoder (`models/network/decoder.py`) makes this backend on a CPU
with native kernels.

A table's `reserve` allocates blocks. They are released as soon as no entry of the sequence is in them. A shared block
is copied before the sequence writes to it. Every block in a table is counted once in the pool: whatever appends one
must have allocated or shared it, and whatever removes one must release it.

Recurrent state is of all entries and replaced by every pass. It is kept where committed entries are cached and nothing
is pending. A decode pass keeps its mixers' inputs until the next one, so that a rollback computes the state again.

tests/runtime/kv/test_block_table.py compares random operations with a plain model of memory, test_paged.py passes with
those of buffers of one sequence, bit for bit.
E = model width, N = tokens of a pass.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple, cast

import mlx.core as mx

from headrace.runtime.errors import EngineError, PoolFullError
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, KVShape, PassRow, compute_after, first_visible
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.kv.pool import BlockPool, make_pool
from headrace.runtime.kv.prefix_index import PrefixNode, PrefixPath, matching_entries
from headrace.runtime.kv.reuse import ReusableCache
from headrace.runtime.metrics.cost import ROLLBACK
from headrace.runtime.ops import (
    BLOCK,
    AttentionSpec,
    LayersNode,
    MixerSpec,
    Ops,
    Pass,
    Phase,
    Projections,
    SequenceRows,
)

NO_BLOCK = -1  # in a table: entries outside the group's window


class MixerInputs(NamedTuple):
    """The newest decode pass of one recurrent layer.

    before: the sequence's state before the pass.
    x: (1, N, projected), of all sequences.
    rows: the rows of `x` of this sequence.
    """

    before: mx.array
    x: mx.array
    rows: slice


class BlockTable(ReusableCache):
    """Block table of one sequence: its blocks of `pool` in every layer group, and its recurrent state."""

    def __init__(self, pool: BlockPool, limit: int) -> None:
        super().__init__(pool, limit)
        self.pool = pool
        self.tables: list[list[int]] = [[] for _ in pool.windows]  # of each group: its blocks, in order of entries
        self.dropped = [0] * len(pool.windows)  # leading blocks outside each group's window
        self.states = pool.storage.fresh_states()  # of `length` entries, of each recurrent layer
        self._state_bytes = sum(state.nbytes for state in self.states)  # for any number of entries
        self.needs_marks = bool(self.states)
        self._inputs: dict[int, MixerInputs] = {}  # by recurrent layer; none unless the newest pass decoded

    def keep_inputs(self, index: int, x: mx.array, rows: slice) -> None:
        """Keep a mixer's inputs (1, N, projected) in the pass being built, before its state is replaced.

        index: of the layer among the recurrent ones.
        rows: of this sequence.
        """
        self._inputs[index] = MixerInputs(self.states[index], x, rows)

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """Allocate blocks for `tokens` more entries, up to the limit. Raises PoolFullError and allocates nothing."""
        self.phase = phase
        self._inputs.clear()
        # Dropped first: the blocks may be those that are allocated next.
        self._drop_outside_windows()
        end = min(self.length + tokens, self.limit)
        try:
            for group, table in enumerate(self.tables):
                self._copy_shared_last(group, table)
                while len(table) * BLOCK < end:
                    table.append(self.pool.allocate(group))
        except BaseException:  # a full pool, or Ctrl-C between two blocks: those of this call go back
            self._release_past(self.length)
            raise

    def reachable(self, length: int) -> int:
        """Return `length`, or 0 if a window there lacks blocks, or recurrent state."""
        if self.states and length != self.committed:
            return 0
        return self._in_windows(length)

    def close(self) -> None:
        """Release every block."""
        self.length = self.committed = 0
        self._shorten(pending=True)

    @property
    def blocks(self) -> int:
        """Number of its blocks in all groups."""
        return sum(len(table) - dropped for table, dropped in zip(self.tables, self.dropped, strict=True))

    @property
    def committed_bytes(self) -> int:
        nbytes = self._state_bytes if self.committed else 0
        storage = self.pool.storage
        for group, dropped in zip(storage.store.groups, self.dropped, strict=True):
            rows = len(group.layers) * max(0, self.committed - dropped * BLOCK)
            nbytes += rows * storage.shape.row_bytes(group.kind)
        return nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of its blocks, shared ones included, and of its recurrent state."""
        nbytes = self._state_bytes
        for group, (table, dropped) in enumerate(zip(self.tables, self.dropped, strict=True)):
            nbytes += self.pool.storage.block_bytes(group) * (len(table) - dropped)
        return nbytes

    def _drop_outside_windows(self) -> None:
        """Release blocks outside the windows, except the ROLLBACK entries that going back needs."""
        committed = min(self.committed, self.length)
        for group, (window, table) in enumerate(zip(self.pool.windows, self.tables, strict=True)):
            first = first_visible(committed - ROLLBACK, window) // BLOCK
            for index in range(self.dropped[group], first):
                self.pool.release(group, table[index])
                table[index] = NO_BLOCK
                self.dropped[group] = index + 1

    def _copy_shared_last(self, group: int, table: list[int]) -> None:
        """Replace the partial last block by a copy if it is shared or cached."""
        index, entries = divmod(self.length, BLOCK)
        if entries == 0 or self.pool.may_write(group, table[index]):
            return
        block = self.pool.allocate(group)
        self.pool.storage.copy(group, table[index], block, entries)
        self.pool.release(group, table[index])
        table[index] = block

    def _load(self, path: PrefixPath) -> int:
        """Share the whole blocks of a path, and copy its partial last one, as the sequence will write to that.

        Return the entries that the tables have then: 0 if a window or the recurrent state lacks anything there.
        """
        length = matching_entries(path)
        nodes = [node for node, _ in path]
        num_whole = length // BLOCK  # only the last node may match in part
        self._share_blocks(nodes[:num_whole], length)
        if len(nodes) > num_whole and not self._copy_part(nodes[-1], length % BLOCK):
            # The pool is full, so the sequence computes the entries of the partial block itself. From a shorter length
            # a window reaches further back: to blocks that may not have been shared.
            nodes = nodes[:num_whole]
            length = self._in_windows(num_whole * BLOCK)
        if self.states and not self._load_states(nodes):
            length = 0
        self._release_past(length)
        return length

    def _share_blocks(self, nodes: Sequence[PrefixNode], length: int) -> None:
        """Append the blocks of whole nodes, as far back as a sequence of this length needs them in each group."""
        for group, table in enumerate(self.tables):
            first = self._first_needed(group, nodes, length)
            self.dropped[group] = first
            table += [NO_BLOCK] * first  # a block's index in the table is that of its entries, divided by BLOCK
            for node in nodes[first:]:
                block = node.blocks[group]
                assert block is not None
                self.pool.share(group, block)
                table.append(block)

    def _load_states(self, nodes: Sequence[PrefixNode]) -> bool:
        """Start with the recurrent state after the last node; return False if it was not kept."""
        states = self.pool.states_of(nodes[-1]) if nodes else None
        if not states:
            return False
        self.states = list(states)
        return True

    def _in_windows(self, length: int) -> int:
        """Return `length`, or 0 if a window there lacks blocks."""
        for window, dropped in zip(self.pool.windows, self.dropped, strict=True):
            if dropped * BLOCK > first_visible(length, window):
                return 0
        return length

    def _copy_part(self, node: PrefixNode, entries: int) -> bool:
        """Copy the first entries of a node's blocks into new ones; return False if the pool is full."""
        sources = [(group, block) for group, block in enumerate(node.blocks) if block is not None]
        for group, block in sources:
            self.pool.share(group, block)  # allocating the copy must not evict it
        try:
            for group, block in sources:
                self.tables[group].append(self.pool.allocate(group))
                self.pool.storage.copy(group, block, self.tables[group][-1], entries)
        except PoolFullError:
            return False
        finally:
            for group, block in sources:
                self.pool.release(group, block)
        return True

    def _first_needed(self, group: int, nodes: Sequence[PrefixNode], length: int) -> int:
        """Return the first block that a sequence of this length has in the group's window."""
        first = len(nodes)
        least = first_visible(length - ROLLBACK, self.pool.windows[group]) // BLOCK
        while first > least and nodes[first - 1].blocks[group] is not None:
            first -= 1
        return first

    def _cache_block(self, entries: slice, tokens: Sequence[int], decode_written: bytes) -> PrefixNode | None:
        index = entries.start // BLOCK
        blocks = [None if table[index] == NO_BLOCK else table[index] for table in self.tables]
        return self.pool.cache_blocks(self._parent(self.pool), tokens, decode_written, blocks)

    def cache_blocks(self, tokens: Sequence[int], *, end: bool = False) -> PrefixNode | None:
        """See `ReusableCache`. With recurrent state and nothing pending, a partial last block is cached, too.

        Without K/V, it is cached only then: its node would have nothing to look up.
        """
        settled = bool(self.states) and self.length == self.committed
        has_kv = bool(self.tables)
        node = super().cache_blocks(tokens, end=settled or (end and has_kv))
        if settled and node is not None:
            self.pool.keep_states(node, self.states)
        return node

    def _shorten(self, pending: bool) -> None:
        if pending and any(len(table) * BLOCK >= self.length + BLOCK for table in self.tables):
            self.pool.storage.settle()  # a pass in flight may write to the blocks
        self._release_past(self.length)
        if self.states:
            num_dropped = len(self._decode_written) - self.length  # the list is cut last, by the base class
            self._restore_states(num_dropped)
        if len(self._nodes) > self.length // BLOCK:
            self.pool.prune(self._nodes[-1])  # one that has neither a block nor a state
        super()._shorten(pending)

    def _restore_states(self, num_dropped: int) -> None:
        """Set the recurrent state back by the newest entries, which are of the newest pass, or to that of no entries.

        A state cannot be computed backwards. So each layer's state before the pass, which `keep_inputs` kept, is
        advanced again by the inputs of the entries that remain.
        """
        storage = self.pool.storage
        if not self.length:
            self.states = storage.fresh_states()
        elif num_dropped:
            if len(self._inputs) < len(self.states):
                raise EngineError("recurrent state goes back by one decode pass only")
            for index, (state, x, rows) in self._inputs.items():
                num_remaining = rows.stop - rows.start - num_dropped  # entries of the pass that stay
                if num_remaining:
                    remaining = x[:, rows.start : rows.start + num_remaining]  # (1, num_remaining, projected)
                    spec = storage.shape.mixers[index]
                    _, [state] = storage.ops.mix_pass(remaining, [state], [num_remaining], spec)
                self.states[index] = state
        self._inputs.clear()

    def _release_past(self, length: int) -> None:
        """Release the blocks without an entry before `length`, the last one first."""
        num_blocks = -(-length // BLOCK)
        for group, table in enumerate(self.tables):
            while len(table) > num_blocks:
                block = table.pop()
                if block != NO_BLOCK:
                    self.pool.release(group, block)
            self.dropped[group] = min(self.dropped[group], len(table))


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
