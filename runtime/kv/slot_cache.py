"""One sequence's K/V in contiguous buffers: its own, or a slot of shared ones (`runtime.kv.buffers`).

Layers of one window and shape share the position of their first row. A full buffer grows to the entries that are
reserved for the sequence; beyond them it doubles, later it grows by GROWTH rows, one layer at a time. Packed formats
have three arrays where others have one: codes, scales and offsets.

Stock MLX attends to whole buffers only, so cached prefixes are copied from and to blocks of a pool. A sequence uses
blocks only within a call, so all of them can be evicted at any time.

    positions   0 ....... first ................... length ......... first + capacity
    rows                  0 ...................... length - first .. capacity

`BufferBackend` makes the caches, and moves them between own buffers and slots (`share`, `leave`). Kernels may write in
place behind MLX's graph: `arrays` has what the last pass wrote. Guards: tests/runtime/kv/test_slot_cache.py,
test_buffers.py, test_packed_cache.py; tests/models/network/test_windows.py for windows.
L = layers of a group, Hkv = key/value heads, D = head dimension.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.cache import CHUNK, KVShape, compute_after, first_visible
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.prefix_index import PrefixNode, PrefixPath, digest, matching_entries
from headrace.runtime.kv.reuse import ReusableCache
from headrace.runtime.machine.memory import moving_buffers
from headrace.runtime.metrics.cost import DROPPED, ROLLBACK
from headrace.runtime.ops import BLOCK, AttentionSpec, LayersNode, Ops, Phase, Projections, packed, reference
from headrace.runtime.ops.block_sparse import attend_blocks
from headrace.runtime.ops.indexed import Choice, attend_indexed
from headrace.runtime.ops.passes import grouped

GROWTH = 1024  # entries: the most that is allocated ahead of need, so that a long context wastes little memory
_PACKED_PARTS = len(packed.PackedRows._fields)  # arrays of a layer's keys, and of its values


class Span(Struct):
    """Rows of the layers of one kind.

    window: of their attention; None for none.
    layers: their indices.
    row_bytes: of one row in one layer, keys and values.
    first: position of the first row.
    capacity: number of rows.
    """

    window: int | None
    layers: list[int]
    row_bytes: int
    first: int = 0
    capacity: int = 0

    def fit(self, end: int, committed: int, limit: int, reserved: int = 0) -> tuple[int, int]:
        """Return (first, capacity) with rows for all positions before `end`, unchanged if there are enough.

        end: entries of the sequence after the next pass.
        committed: entries that are final.
        limit: entries at most.
        reserved: entries that the sequence is expected to have; more rows are for them, if any are made.

        A window's buffer has room for the window, ROLLBACK and as many new entries, or a longer chunk. Then the needed
        `committed` entries move to the front, amortised O(1) times each.
        """
        if end - self.first <= self.capacity:
            return self.first, self.capacity
        first = self.first
        max_capacity = limit - self.first
        if self.window is not None:
            # Entries that the next token attends to, or that it would after a rollback.
            window_entries = self.window - 1 + ROLLBACK
            if end - first > window_entries + ROLLBACK:
                # In multiples of DROPPED, so that attention adds entries in the same order as before.
                first = max(first, (committed - window_entries) // DROPPED * DROPPED)
            max_capacity = min(window_entries + ROLLBACK, limit - first)
        # Room ahead of need: for all reserved entries, or twice as much as before, but never above the bounds.
        ahead = max(reserved - first, min(2 * self.capacity, self.capacity + GROWTH))
        wanted = max(end - first, min(ahead, max_capacity))
        return first, -(-wanted // CHUNK) * CHUNK  # rounded up to whole chunks

    def shared_capacity(self, limit: int) -> int:
        """Return a capacity common to sequences of similar length: a power of two, or a multiple of GROWTH."""
        alike = -(-self.capacity // GROWTH) * GROWTH
        # Up to GROWTH rows: the least power of two that is enough, CHUNK or more.
        while CHUNK < alike <= GROWTH and alike // 2 >= self.capacity:
            alike //= 2
        max_capacity = limit
        if self.window is not None:
            max_capacity = min(limit, self.window - 1 + 2 * ROLLBACK)
        return max(self.capacity, min(alike, -(-max_capacity // CHUNK) * CHUNK))


class SlotCache(ReusableCache):
    """Buffers of one sequence, `slot` of `buffers` if shared. pool: see `ReusableCache`.

    keys, values: of each layer (slots, Hkv, capacity, D), or three packed arrays per layer (`packed.PackedRows`); empty
    where a layer reads another's. Kernels may write them in place, outside the graph: read them through `arrays`.
    """

    def __init__(
        self, shape: KVShape, ops: Ops, limit: int, pool: BlockPool | None = None, scales: mx.Dtype = mx.float16
    ) -> None:
        """Begin without entries.

        shape: of the entries in all layers.
        ops: attend, and grow buffers.
        limit: entries at most.
        pool: blocks of prefixes; None: nothing is shared.
        scales: dtype of a packed format's scales, half precision.
        """
        super().__init__(pool, limit)
        self._shape = shape
        self._ops = ops
        kinds = grouped(shape.kinds)  # in this order the layer groups of the pool are numbered, too (`KVStore`)
        self.spans = [Span(kind.window, layers, shape.row_bytes(kind)) for kind, layers in kinds.items()]
        self.firsts = [0] * shape.layers  # the position of each layer's first row
        # Lists by layer; a packed layer has `parts` entries in a row: codes, scales, offsets.
        self.parts = _PACKED_PARTS if shape.format.packed else 1  # arrays of a layer's keys
        self.keys, self.values = (_empty(shape, scales, values=side) for side in (False, True))
        self.buffers: object | None = None  # the `SlotBuffers` of `keys` and `values`, if shared
        self.slot = 0  # first index of the arrays; 0 in own buffers, which have one slot
        self.closed = False  # counts no memory any more
        self.reserved = 0  # entries, in the KV budget; set by the backend
        self._used: list[tuple[int, int]] = []  # (group, block), within `cache_blocks`
        self._choices: list[Choice] = []  # of the last layer with an indexer of its own
        self._newest: mx.array | None = None  # the output of the last layer that appended
        self._previous: mx.array | None = None  # that of the pass before, until a layer's input depends on it

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """Append and attend. qkv: projections of (1, T) tokens -> (1, T, H * D)."""
        layer = self.source(layer)
        keys = self.keys
        values = self.values
        first = self.firsts[layer]
        if spec.chosen is not None:
            index = self._shape.index_keys_of(layer)
            indexer_kv = None
            if index is not None:
                indexer_kv = (keys[index], values[index])
            layer_kv = (keys[layer], values[layer])
            if spec.chooser is not None:
                assert indexer_kv is not None
                return attend_blocks(self._ops, qkv, layer_kv, indexer_kv, self.length, spec, self.phase)
            return attend_indexed(self._ops, qkv, layer_kv, indexer_kv, self._choices, self.length, spec, self.phase)
        if self.buffers is not None:
            out, keys[layer], values[layer] = reference.attend(
                qkv, keys[layer], values[layer], self.length, spec, first, self.phase, self.slot
            )
            return out
        qkv = compute_after(qkv, self._previous)
        self._previous = None
        if self._shape.format.packed:
            parts = slice(layer * _PACKED_PARTS, (layer + 1) * _PACKED_PARTS)
            packed_keys = packed.PackedRows(*keys[parts])
            packed_values = packed.PackedRows(*values[parts])
            out, keys[parts], values[parts] = packed.attend(
                qkv, packed_keys, packed_values, self.length, spec, first, self._shape.format
            )
        else:
            out, keys[layer], values[layer] = self._ops.attend(
                qkv, keys[layer], values[layer], self.length, spec, first, self.phase
            )
        if spec.appends and self._ops.pages(spec):  # kernels that write in place; others return what they appended
            self._newest = out
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode, *, output: bool) -> mx.array:
        """Run whole layers in one node, on own unpacked buffers. x (1, T, E) -> (1, T, E); see `KVPass.run_fused`."""
        wanted = x.shape[1]  # rows of the output
        if not output and layers.stop >= self._shape.num_appending_layers:
            wanted = 0
        sources = [self.source(layer) for layer in range(layers.start, layers.stop)]
        keys, values = ([side[layer] for layer in sources] for side in self.sides)
        firsts = [self.firsts[layer] for layer in sources]
        x = compute_after(x, self._previous)
        self._previous = None
        x = node(x, keys, values, self.length, firsts, self.phase, wanted)
        if max(sources) >= layers.start:  # some of them append
            self._newest = x
        return x

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self._previous = self._newest
        self._newest = None

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """Make room for `tokens` more entries: grow, or drop entries outside the windows."""
        self.phase = phase
        end = self.length + tokens
        # All spans are fitted before any is changed: a new capacity may need `leave` first, which copies all layers.
        changed: list[tuple[Span, int, int]] = []  # with its new position and capacity
        for span in self.spans:
            first, capacity = span.fit(end, self.committed, self.limit, self.reserved)
            if (first, capacity) != (span.first, span.capacity):
                changed.append((span, first, capacity))
        if not changed:
            return
        mx.eval(self.arrays)  # copying needs them, in-place writes included
        if any(capacity != span.capacity for span, _, capacity in changed):
            self.leave()
        with moving_buffers():
            for span, first, capacity in changed:
                # Rows of the old buffer; none if all entries are before `first`.
                remaining = slice(first - span.first, max(first, self.length) - span.first)
                for layer in span.layers:
                    self._move(layer, remaining, capacity)
                self._set_first(span, first)
                span.capacity = capacity

    def restart(self) -> None:
        """Drop every entry but keep the committed length; the network appends them anew."""
        self.length = 0
        for span in self.spans:
            self._set_first(span, 0)

    def reachable(self, length: int) -> int:
        """Return `length`, or 0 if a window there lacks rows."""
        if any(span.first > first_visible(length, span.window) for span in self.spans):
            return 0
        return length

    def close(self) -> None:
        """Leave the shared buffers, and count no memory any more."""
        self.buffers = None
        self.closed = True

    def share(self, buffers: object, sides: tuple[list[mx.array], list[mx.array]], slot: int) -> None:
        """Continue in a slot of the `sides` of shared buffers, into which the entries were copied."""
        self.buffers = buffers
        self.slot = slot
        self.keys, self.values = sides
        for span in self.spans:
            span.capacity = span.shared_capacity(self.limit)
        self._newest = None  # the shared arrays depend on what was appended
        self._previous = None

    def leave(self) -> None:
        """Continue in own buffers."""
        if self.buffers is None:
            return
        slots = mx.array([self.slot])
        self.keys, self.values = ([mx.take(layer, slots, axis=0) for layer in side] for side in self.sides)
        mx.eval(self.keys, self.values)  # copied before another sequence gets the slot
        self.buffers = None
        self.slot = 0

    def source(self, layer: int) -> int:
        """Return the layer whose K/V this one reads."""
        return self._shape.source(layer)

    @property
    def sides(self) -> tuple[list[mx.array], list[mx.array]]:
        """Keys and values, as lists that can be assigned to."""
        return self.keys, self.values

    def shared_capacities(self) -> tuple[int, ...]:
        """Return the capacity of each layer in shared buffers."""
        capacities = [0] * self._shape.layers
        for span in self.spans:
            for layer in span.layers:
                capacities[layer] = span.shared_capacity(self.limit)
        return tuple(capacities)

    @property
    def capacity(self) -> int:
        """Entries that fit before rows move or buffers grow."""
        return min(span.first + span.capacity for span in self.spans)

    @property
    def committed_bytes(self) -> int:
        return sum(len(span.layers) * max(0, self.committed - span.first) * span.row_bytes for span in self.spans)

    @property
    def allocated_bytes(self) -> int:
        return sum(len(span.layers) * span.capacity * span.row_bytes for span in self.spans)

    @property
    def arrays(self) -> list[mx.array]:
        """All keys, then all values, after all appends."""
        arrays = [*self.keys, *self.values]
        # Reading needs what kernels wrote in place: in this pass, or else in the one before.
        pending = self._previous
        if self._newest is not None:
            pending = self._newest
        if pending is None:
            return arrays
        ordered: list[mx.array] = mx.depends(arrays, pending)
        return ordered

    def _move(self, layer: int, entries: slice, capacity: int) -> None:
        """Copy these entries of a layer to the front of new buffers, one by one; the old memory is freed at once."""
        if self.buffers is not None:
            slots = slice(self.slot, self.slot + 1)
            for side in self.sides:
                rows = reference.grow(side[layer][slots, :, entries], capacity)
                mx.eval(rows)
                side[layer][slots] = rows
                mx.eval(side[layer])
            return
        for side in self.sides:
            for part in range(layer * self.parts, (layer + 1) * self.parts):
                side[part] = self._ops.grow(side[part][:, :, entries], capacity)
                mx.eval(side[part])

    def _set_first(self, span: Span, first: int) -> None:
        """Set the position of the first row, for the span and each of its layers."""
        span.first = first
        for layer in span.layers:
            self.firsts[layer] = first

    def _shorten(self, pending: bool) -> None:
        super()._shorten(pending)
        if self.length == 0:
            self.restart()

    def cache_blocks(self, tokens: Sequence[int], *, end: bool = False) -> None:
        """See `ReusableCache`. Copies into blocks, as far as memory is spare."""
        if self._pool is None:
            return
        self._drop_evicted()
        if len(self._nodes) == self._num_blocks(end):
            return
        try:
            for node in self._nodes:  # in use until the end, so that the end of a path does not evict its beginning
                self._use(node)
            super().cache_blocks(tokens, end=end)
        except PoolFullError:
            pass
        finally:
            for group, block in reversed(self._used):  # the last one first: see `BlockPool.release`
                self._pool.release(group, block)
            self._used.clear()

    def _cache_block(self, entries: slice, tokens: Sequence[int], decode_written: bytes) -> PrefixNode | None:
        """See `ReusableCache`. Copies the rows of each group into a block, unless the node has one there."""
        pool = cast(BlockPool, self._pool)
        parent = self._parent(pool)
        node = parent.children.get(digest(parent.key, tokens, decode_written))
        if node is not None:
            self._use(node)
        numbers: list[int | None] = [None] * len(self.spans)
        for group, span in enumerate(self.spans):
            # A window has dropped the rows, or the block is there already.
            if span.first > entries.start or (node is not None and node.blocks[group] is not None):
                continue
            number = pool.allocate(group)
            numbers[group] = number
            self._used.append((group, number))
            pool.storage.write(group, number, self._read(group, entries))
        return pool.cache_blocks(parent, tokens, decode_written, numbers)

    def _use(self, node: PrefixNode) -> None:
        """Count a user of a node's blocks until `cache_blocks` ends."""
        for group, block in enumerate(node.blocks):
            if block is not None:
                cast(BlockPool, self._pool).share(group, block)
                self._used.append((group, block))

    def _read(self, group: int, entries: slice) -> mx.array:
        """Return entries of a group in a block's layout (L, 2, Hkv, entries, D)."""
        span = self.spans[group]
        arrays = self.arrays
        layers = self._shape.layers
        rows = slice(entries.start - span.first, entries.stop - span.first)
        # `arrays` has the keys of all layers, then their values.
        parts = [arrays[side + layer][self.slot, :, rows] for layer in span.layers for side in (0, layers)]
        return mx.stack(parts).reshape(len(span.layers), 2, *parts[0].shape)

    def _load(self, path: PrefixPath) -> int:
        """See `ReusableCache`. Copies the blocks into own buffers."""
        if path:
            for group in range(len(self.spans)):
                self._fill(group, path)
        return matching_entries(path)

    def _fill(self, group: int, path: PrefixPath) -> None:
        """Fill new buffers of a group's layers from blocks, as far back as its window needs.

        A rollback is allowed for if the blocks are there. Unpacked formats only: others have no pool.
        """
        span = self.spans[group]
        length = matching_entries(path)
        # From the last block backwards: all that the window can see after a rollback, as far as none was evicted.
        first = len(path)
        least = first_visible(length - ROLLBACK, span.window) // BLOCK
        numbers: list[int] = []
        while first > least and (number := path[first - 1][0].blocks[group]) is not None:
            numbers.insert(0, number)
            first -= 1
        # The first row is that of the first block; the last block may be used in part.
        count = length - first * BLOCK
        self._set_first(span, first * BLOCK)
        _, span.capacity = span.fit(length, length, self.limit, self.reserved)
        blocks = [cast(BlockPool, self._pool).storage.read(group, number, BLOCK) for number in numbers]
        for index, layer in enumerate(span.layers):
            for side, buffers in enumerate(self.sides):
                rows = mx.concatenate([block[index, side] for block in blocks], axis=1)[None, :, :count]
                buffers[layer] = self._ops.grow(rows, span.capacity)
                mx.eval(buffers[layer])  # one at a time: all layers' copies at once would take twice the memory


def _empty(shape: KVShape, scales: mx.Dtype, *, values: bool) -> list[mx.array]:
    """Return the empty arrays of all layers' keys or values."""
    coding = shape.format.values if values else shape.format.keys

    def of_layer(kv_heads: int, head_dim: int) -> list[mx.array]:
        widths = [(head_dim, shape.format.dtype)]
        if shape.format.packed:
            groups = head_dim // coding.group
            widths = [(head_dim * coding.bits // 32, mx.uint32), (groups, scales), (groups, scales)]
        return [mx.zeros((1, kv_heads, 0, width), dtype) for width, dtype in widths]

    return [array for layer in range(shape.layers) for array in of_layer(*shape.heads_of(layer))]
