"""The KV cache: what the engine and the layers need of one, and the contiguous layout.

Contract of a pass of T tokens: `reserve(T)` makes room; every layer, in order and once, appends T entries at `length`
and attends over everything up to them, by `attend` or within `run_fused`; `advance(T)` then moves `length`.
`commit(T)` declares entries final, `rollback()` forgets the ones appended ahead of the commit.

Two protocols, one for each side. `Cache` is the engine's: lengths, room and bytes. `LayerCache` is the layers': a
network hands over projections, or a fused node of whole layers, and gets activations. Where the entries are is between
the cache and the operations it is made with (`Ops.attend`, `LayersNode`), so that a quantized, paged or batched layout
can take `KVCache`'s place without a network or the engine noticing.

`KVCache` is unified memory, preallocated. Its buffers may be written in place, outside the graph: a layer's input has
to follow from the layer before it, and the buffers are to be read through `arrays`, which waits for what was appended.
B = sequences, T = new tokens, E = model width, H / Hkv = query / key-value heads, D = head dimension.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import mlx.core as mx

from headrace.runtime.cost import kv_row_bytes
from headrace.runtime.errors import ContextLimitError
from headrace.runtime.ops import AttentionSpec, LayersNode, Ops, Projections

CHUNK = 256  # entries; capacities are multiples of it

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
    def can_rollback(self) -> bool:
        """False where appended entries cannot be taken back (recurrent state): then nothing may run ahead."""
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

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more entries in every layer, before the pass that appends them."""
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
        """Keep the first `length` committed entries, drop the rest (also what is pending)."""
        ...


class LayerCache(Protocol):
    """What a network's layers need of a cache. Only between `reserve(T)` and `advance(T)`, layers in order."""

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec, /) -> mx.array:
        """Append the layer's new K/V and attend. qkv (B, T, (H + 2 Hkv) * D) or its parts -> (B, T, H * D)."""
        ...

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode, /) -> mx.array:
        """Pass x (B, T, E) through whole layers that append and attend by themselves, in one node -> (B, T, E)."""
        ...


class Lengths:
    """The bookkeeping every cache layout shares: appended, committed, limit."""

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


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one entry of one sequence holds: K and V of every layer, (Hkv, D) of `dtype` each."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * kv_row_bytes(self.kv_heads, self.head_dim, self.dtype.size)


class KVCache(Lengths):
    """Contiguous buffers per layer, doubling when full: every entry is copied amortised O(1) times."""

    can_rollback = True

    def __init__(self, shape: KVShape, *, limit: int, ops: Ops, batch: int = 1) -> None:
        super().__init__(limit)
        self._shape = shape
        self._batch = batch
        self._ops = ops
        self._capacity = 0
        self.bytes_per_token = batch * shape.bytes_per_token
        self._keys = [self._empty(0) for _ in range(shape.layers)]  # each (B, Hkv, capacity, D)
        self._values = [self._empty(0) for _ in range(shape.layers)]
        self._newest: mx.array | None = None  # what the last layer that appended gave
        self._before: mx.array | None = None  # the same, of the step before: what has to be appended first

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        out, self._keys[layer], self._values[layer] = self._ops.attend(
            self._in_turn(qkv), self._keys[layer], self._values[layer], self.length, spec
        )
        self._newest = out
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        x = node(self._in_turn(x), self._keys[layers], self._values[layers], self.length)
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

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more entries, at least doubling so that copying stays amortised O(1)."""
        needed = self.length + tokens
        if needed <= self._capacity:
            return
        wanted = max(needed, min(2 * self._capacity, self.limit))
        capacity = -(-wanted // CHUNK) * CHUNK
        room = self._empty(capacity - self._capacity)
        grown = [mx.concatenate([buffer, room], axis=2) for buffer in self.arrays]
        self._keys, self._values = grown[: len(self._keys)], grown[len(self._keys) :]
        self._capacity = capacity
        mx.eval(grown)  # what is written in place has to be there

    @property
    def capacity(self) -> int:
        """Entries there is room for before the next growth."""
        return self._capacity

    @property
    def committed_bytes(self) -> int:
        return self.committed * self.bytes_per_token

    @property
    def allocated_bytes(self) -> int:
        return self._capacity * self.bytes_per_token

    @property
    def arrays(self) -> list[mx.array]:
        held = [*self._keys, *self._values]
        pending = self._before if self._newest is None else self._newest
        return held if pending is None else cast(list[mx.array], mx.depends(held, pending))

    def _empty(self, entries: int) -> mx.array:
        shape = self._shape
        return mx.zeros((self._batch, shape.kv_heads, entries, shape.head_dim), shape.dtype)
