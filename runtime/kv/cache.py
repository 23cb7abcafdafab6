"""The KV cache: what the engine and the layers need of one, and the contiguous layout.

Contract of a pass of T tokens: `reserve(T, phase)` makes room; every layer, in order and once, appends T entries at
`length` and attends over everything up to them, by `attend` or within `run_fused`; `advance(T)` then moves `length`.
`commit(T)` declares entries final, `rollback()` forgets the ones appended ahead of the commit. `trim` goes back
further: to any length, or, where a cache forgets (recurrent state, sliding windows), to where it was told to `mark`.

Two protocols, one for each side. `Cache` is the engine's: lengths, room and bytes. `LayerCache` is the layers': a
network hands over projections, or a fused node of whole layers, and gets activations. Where the entries are is between
the cache and the operations it is made with (`Ops.attend`, `LayersNode`), so that a quantized, paged or batched layout
can take `KVCache`'s place without a network or the engine noticing.

A layer that attends through a window keeps the window and what taking entries back needs; a cache can go back as far
as `reachable` says. `KVCache` is unified memory, preallocated. Its buffers may be written in place, outside the graph:
a layer's input has to follow from the layer before it, and the buffers are to be read through `arrays`, which waits for
what was appended.
B = sequences, T = new tokens, E = model width, H / Hkv = query / key-value heads, D = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import mlx.core as mx

from headrace.runtime.errors import ContextLimitError
from headrace.runtime.metrics.cost import DROPPED, ROLLBACK
from headrace.runtime.ops import AttentionSpec, LayersNode, Ops, Phase, Projections
from headrace.runtime.ops.kv_format import KVFormat

CHUNK = 256  # entries; capacities are multiples of it
GROWTH = 1024  # entries: the most that is set aside ahead of need

_Projected = TypeVar("_Projected", mx.array, Projections)


class Cache(Protocol):
    """What the engine needs of a cache, whatever its layout: lengths, room and bytes."""

    limit: int

    @property
    def length(self) -> int:
        """Entries appended so far, committed or not."""
        ...

    @property
    def committed(self) -> int:
        """Entries that are final: what the conversation holds."""
        ...

    @property
    def committed_bytes(self) -> int:
        """Bytes the committed entries occupy."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes set aside, in use or not."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """The state arrays, to evaluate after a prefill chunk."""
        ...

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """Make room for `tokens` more entries in every layer, before the pass of this phase that appends them."""
        ...

    def advance(self, tokens: int) -> None:
        """`tokens` entries have been appended to every layer. Raises ContextLimitError past the limit."""
        ...

    def commit(self, tokens: int) -> None:
        """The next `tokens` appended entries are final."""
        ...

    def rollback(self) -> None:
        """Forget what was appended but never committed."""
        ...

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries, drop the rest (also what is pending). See `reachable`."""
        ...

    @property
    def needs_marks(self) -> bool:
        """Whether `trim` comes back to marks only, since the cache forgets (recurrent state, sliding windows)."""
        ...

    def close(self) -> None:
        """Give back what others may have: it is not used again."""
        ...

    def mark(self) -> None:
        """Remember the committed entries of now, nothing pending: `trim` can come back. Old marks give way to new."""
        ...

    def reachable(self, length: int) -> int:
        """The most of the first `length` committed entries that `trim` can keep; 0 where it would keep none."""
        ...


class LayerCache(Protocol):
    """What a network's layers need of a cache. Only between `reserve(T)` and `advance(T)`, layers in order."""

    runs_fused: bool
    """Whether it takes `run_fused`; else layers come one by one, by `attend`."""

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec, /) -> mx.array:
        """Append the layer's new K/V and attend. qkv (B, T, (H + 2 Hkv) * D) or its parts -> (B, T, H * D)."""
        ...

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode, /) -> mx.array:
        """Pass x (B, T, E) through whole layers that append and attend by themselves, in one node -> (B, T, E)."""
        ...


class Lengths:
    """The bookkeeping every cache layout shares: appended, committed, limit. Entries can be taken back one by one."""

    needs_marks = False

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a cache needs room for at least one token, not {limit}")
        self.limit = limit
        self.length = 0
        self.committed = 0

    def advance(self, tokens: int) -> None:
        """`tokens` entries have been appended to every layer. Raises ContextLimitError past the limit."""
        if self.length + tokens > self.limit:
            raise ContextLimitError(f"the context limit of {self.limit} tokens is reached")
        self.length += tokens

    def commit(self, tokens: int) -> None:
        """The next `tokens` appended entries are final."""
        if self.committed + tokens > self.length:
            raise ValueError(f"cannot commit {tokens} of {self.length - self.committed} pending entries")
        self.committed += tokens

    def rollback(self) -> None:
        """Forget what was appended but never committed."""
        self.length = self.committed

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries, drop the rest (also what is pending)."""
        if not 0 <= length <= self.committed:
            raise ValueError(f"cannot trim {self.committed} committed entries to {length}")
        self.length = self.committed = length

    def close(self) -> None:
        """Its memory goes with it."""

    def mark(self) -> None:
        """Every length can be come back to as it is."""

    def reachable(self, length: int) -> int:
        """The most of the first `length` committed entries that `trim` can keep."""
        return length


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one entry of one sequence holds: K and V of every layer, (Hkv, D) in `format` each.

    windows: the attention window of each layer, None for none; () where no layer has one.
    """

    layers: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    windows: tuple[int | None, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of an entry in one layer."""
        return self.format.row_bytes(self.kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.row_bytes


@dataclass(slots=True)
class _Span:
    """The positions [first, first + capacity) that the layers of one window have rows for."""

    window: int | None
    layers: list[int]
    first: int = 0
    capacity: int = 0

    def place(self, end: int, committed: int, limit: int) -> tuple[int, int]:
        """(first, capacity) with rows for the positions before `end`; as they are if there are.

        Growth doubles, up to GROWTH rows. A window's buffer has room for the window, ROLLBACK and as many new entries,
        or for a longer chunk; then what it needs of the `committed` entries moves to the front, amortised O(1) times
        each.
        """
        if end - self.first <= self.capacity:
            return self.first, self.capacity
        first, most = self.first, limit - self.first
        if self.window is not None:
            kept = self.window - 1 + ROLLBACK
            if end - first > kept + ROLLBACK:
                first = max(first, (committed - kept) // DROPPED * DROPPED)
            most = min(kept + ROLLBACK, limit - first)
        wanted = max(end - first, min(2 * self.capacity, self.capacity + GROWTH, most))
        return first, -(-wanted // CHUNK) * CHUNK

    def shared_capacity(self, limit: int) -> int:
        """Rows as well for others of about as many entries: a power of two, or from GROWTH on a multiple of it."""
        alike = -(-self.capacity // GROWTH) * GROWTH
        while CHUNK < alike <= GROWTH and alike // 2 >= self.capacity:
            alike //= 2
        most = limit if self.window is None else min(limit, self.window - 1 + 2 * ROLLBACK)
        return max(self.capacity, min(alike, -(-most // CHUNK) * CHUNK))


Placed = tuple[_Span, int, int]  # with the first position and the capacity that it is to have


class KVCache(Lengths):
    """Contiguous buffers per layer; layers of one window share where theirs begin.

    A full buffer grows to twice as many rows, later by GROWTH: what is copied is little beside what the steps between
    two growths read. Growing takes room for one more buffer of one layer, never for another cache.
    """

    runs_fused = True

    def __init__(self, shape: KVShape, *, limit: int, ops: Ops, batch: int = 1) -> None:
        super().__init__(limit)
        self._shape = shape
        self._batch = batch
        self._ops = ops
        windows = shape.windows or (None,) * shape.layers
        kinds = dict.fromkeys(windows)
        self._spans = [_Span(kind, [i for i, window in enumerate(windows) if window == kind]) for kind in kinds]
        self.firsts = [0] * shape.layers  # the position of each layer's first row
        self.phase: Phase = "prefill"  # of the pass under way
        self.bytes_per_token = batch * shape.bytes_per_token
        self._keys = [self._empty(0) for _ in range(shape.layers)]  # each (B, Hkv, capacity, D)
        self._values = [self._empty(0) for _ in range(shape.layers)]
        self._newest: mx.array | None = None  # what the last layer that appended gave
        self._before: mx.array | None = None  # the same, of the step before: what has to be appended first

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        out, self._keys[layer], self._values[layer] = self._ops.attend(
            self._in_turn(qkv),
            self._keys[layer],
            self._values[layer],
            self.length,
            spec,
            self.firsts[layer],
            self.phase,
        )
        self._newest = out
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        keys, values = self._keys[layers], self._values[layers]
        x = node(self._in_turn(x), keys, values, self.length, self.firsts[layers], self.phase)
        self._newest = x
        return x

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self._before, self._newest = self._newest, None

    def _in_turn(self, x: _Projected) -> _Projected:
        """`x`, not to be had before the last step has appended: buffers written in place do not say so themselves."""
        if self._before is None:
            return x
        before, self._before = self._before, None
        return cast(_Projected, mx.depends(x, before))

    def begin_again(self) -> None:
        """Drop every entry, for the network to append them anew up to the same length, in passes of their own."""
        self.length = 0
        for span in self._spans:
            self._begin(span, 0)

    def reachable(self, length: int) -> int:
        """The most of the first `length` committed entries that `trim` can keep: 0 where a window there lacks rows."""
        lacks = any(span.window and span.first > max(0, length - span.window + 1) for span in self._spans)
        return 0 if lacks else length

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries, drop the rest. Raises ValueError past what is `reachable`."""
        if 0 < length <= self.committed and not self.reachable(length):
            raise ValueError(f"the cache has dropped what it would need to go back to {length} entries")
        super().trim(length)
        if length == 0:
            self.begin_again()

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """Make room for `tokens` more entries: by growing, or where a window has enough rows, by dropping old ones."""
        self.phase = phase
        placed = [(span, *span.place(self.length + tokens, self.committed, self.limit)) for span in self._spans]
        if all((first, capacity) == (span.first, span.capacity) for span, first, capacity in placed):
            return
        mx.eval(self.arrays)  # what is to be copied has to be there, and so has what is written in place
        self._place(placed)

    def _place(self, spans: Sequence[Placed]) -> None:
        """Move rows to where they are to be."""
        for span, first, capacity in spans:
            kept = slice(first - span.first, max(first, self.length) - span.first)
            for layer in span.layers if (first, capacity) != (span.first, span.capacity) else ():
                self._move(layer, kept, capacity)
            self._begin(span, first)
            span.capacity = capacity

    def _move(self, layer: int, kept: slice, capacity: int) -> None:
        """Rows `kept` of a layer's buffers into new ones, one by one; the old one's memory goes back at once."""
        for buffers in (self._keys, self._values):
            buffers[layer] = self._ops.grow(buffers[layer][:, :, kept], capacity)
            mx.eval(buffers[layer])
            mx.clear_cache()

    def _begin(self, span: _Span, first: int) -> None:
        span.first = first
        for layer in span.layers:
            self.firsts[layer] = first

    @property
    def capacity(self) -> int:
        """Entries there is room for before rows are moved or buffers grow."""
        return min(span.first + span.capacity for span in self._spans)

    @property
    def committed_bytes(self) -> int:
        rows = sum(len(span.layers) * max(0, self.committed - span.first) for span in self._spans)
        return rows * self._batch * self._shape.row_bytes

    @property
    def allocated_bytes(self) -> int:
        rows = sum(len(span.layers) * span.capacity for span in self._spans)
        return rows * self._batch * self._shape.row_bytes

    @property
    def arrays(self) -> list[mx.array]:
        held = self._held
        pending = self._before if self._newest is None else self._newest
        return held if pending is None else cast(list[mx.array], mx.depends(held, pending))

    @property
    def _held(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def _empty(self, entries: int) -> mx.array:
        shape = self._shape
        return mx.zeros((self._batch, shape.kv_heads, entries, shape.head_dim), shape.format.dtype)
