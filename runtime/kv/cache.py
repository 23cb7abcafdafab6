"""Interfaces of a sequence's K/V cache and of a pass, and the bookkeeping of lengths.

Contract of a pass:
1. The backend makes it for a list of rows, also for one row, and reserves room.
2. Every layer runs once, in order. It appends K and V of all rows and attends, by `attend` or within `run_fused`. Or it
   advances its recurrent state, by `mix`. Some layers do both.
3. `advance` moves the lengths.
4. The engine commits entries, or rolls uncommitted entries back.
`trim` goes back further: to any length, or for caches with recurrent state or sliding windows to a marked length.

    entries:  0 .......... committed .......... length .......... limit
              final        of a pass in flight  free

`KVCache` is the base of the caches here and of mlx-lm's. tests/runtime/kv/test_cache.py compares caches with a plain
list, and test_cache_protocol.py runs an engine over another layout behind these interfaces.
B = sequences, T = new tokens, E = model width, N = tokens of all rows, H / Hkv = query / key-value heads,
D = head dimension.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.errors import ContextLimitError
from headrace.runtime.ops import AttentionSpec, KVKind, LayersNode, MixerSpec, Phase, Projections
from headrace.runtime.ops.kv_format import KVFormat

_Projected = TypeVar("_Projected", mx.array, Projections)
# Entries; capacities of buffers and reservations of memory are multiples of it: few copies, and little unused memory.
CHUNK = 256


class KVCache:
    """One sequence's cache, as the engine uses it: its entries' numbers. Subclasses have the entries.

    limit: entries at most.
    length: entries appended so far, committed or not.
    committed: final entries.
    needs_marks: `trim` reaches marked lengths only (recurrent state, sliding windows); else any committed length.
    """

    needs_marks = False

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a cache needs room for at least one token, not {limit}")
        self.limit = limit
        self.length = 0
        self.committed = 0

    @property
    def committed_bytes(self) -> int:
        """Bytes of the committed entries, with recurrent state. Caches of mlx-lm's networks leave the state out."""
        raise NotImplementedError

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated, in use or not."""
        raise NotImplementedError

    def advance(self, tokens: int) -> None:
        """Count `tokens` entries as appended. Raises ContextLimitError past the limit."""
        if self.length + tokens > self.limit:
            raise ContextLimitError(f"the context limit of {self.limit} tokens is reached")
        self.length += tokens

    def commit(self, tokens: int) -> None:
        """Make the next `tokens` appended entries final."""
        if self.committed + tokens > self.length:
            raise ValueError(f"cannot commit {tokens} of {self.length - self.committed} pending entries")
        self.committed += tokens

    def rollback(self) -> None:
        """Drop the uncommitted entries. Caches with recurrent state drop those that the newest pass committed, too."""
        self.length = self.committed

    def reachable(self, length: int) -> int:
        """Return the most of the first `length` committed entries that `trim` can keep, or 0."""
        return length

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries, and drop all others. See `reachable`."""
        if not 0 <= length <= self.committed:
            raise ValueError(f"cannot trim {self.committed} committed entries to {length}")
        self.length = self.committed = length

    def mark(self) -> None:
        """Make the current length reachable, if not all are; nothing may be pending. Old marks are evicted."""

    def close(self) -> None:
        """Release shared memory, if there is some. The cache is not used again."""


class PassRow(Struct, frozen=True):
    """One sequence's tokens in a pass.

    cache: of the sequence.
    count: new tokens, of one phase.
    output: the output of the layers is wanted. Without, the last layer may append only.
    logits: the last so many tokens have logits.
    hidden: a proposer drafts from the output.
    """

    cache: KVCache
    count: int
    phase: Phase
    output: bool = True
    logits: int = 0
    hidden: bool = False


class KVPass(Protocol):
    """One pass through the layers. x is (1, N, ...): the tokens of the first row, then of the second, and so on."""

    rows: Sequence[PassRow]
    runs_fused: bool
    """True if `run_fused` is available."""

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec, /) -> mx.array:
        """Append a layer's K/V and attend. qkv: projections of (1, N) tokens -> (1, N, H * D)."""
        ...

    def mix(self, layer: int, x: mx.array, spec: MixerSpec, /) -> mx.array:
        """Advance a layer's recurrent state of every row. x (1, N, projected) -> (1, N, Hv * Dv)."""
        ...

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode, /) -> mx.array:
        """Run whole layers, attention included, in one node. x (1, N, E) -> (1, N, E).

        The last layers that append return the rows up to the last with `PassRow.output`: none, if there is none.
        """
        ...

    def advance(self) -> None:
        """Count the appended entries. Raises ContextLimitError past a cache's limit."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """The K/V arrays, to evaluate after a prefill chunk."""
        ...


def first_visible(length: int, window: int | None) -> int:
    """Return the first of `length` entries that the next token attends to; 0 without a window."""
    if window is None:
        return 0
    return max(0, length - window + 1)


def compute_after(x: _Projected, previous: mx.array | None) -> _Projected:
    """Return a pass's first input, to be computed after the pass before; other layers' inputs follow from it.

    Kernels write K/V in place, so MLX's graph does not show that a pass needs what the one before appended.
    previous: the output of the last layer that appended in that pass; None if there was none.
    """
    if previous is None:
        return x
    ordered: _Projected = mx.depends(x, previous)
    return ordered


class KVShape(Struct, frozen=True):
    """Shape of one entry of one sequence: K and V of every layer, (Hkv, D) in `format` each.

    layers: their number, those of the indexers' keys included.
    kv_heads, head_dim: Hkv and D, unless `heads` says otherwise.
    format: of the entries, plain or packed.
    windows: the attention window of each layer, None for none; () if no layer has one.
    recurrent: layers with recurrent state, ascending.
    mixers: the mixing of each of these.
    layers_without_kv: layers that have no K/V.
    heads: (Hkv, D) of each layer, () if all are alike.
    kv_sources: for each layer the one whose K/V it reads, () if each has its own.
    indexed: layers with an indexer, whose keys are the last layers here; see `runtime.ops.indexed`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    windows: tuple[int | None, ...] = ()
    recurrent: tuple[int, ...] = ()
    mixers: tuple[MixerSpec, ...] = ()
    layers_without_kv: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    kv_sources: tuple[int, ...] = ()
    indexed: tuple[int, ...] = ()

    @property
    def kinds(self) -> list[KVKind | None]:
        """Return each layer's window and heads, None without K/V of its own."""
        windows = self.windows or (None,) * self.layers
        kinds: list[KVKind | None] = [None] * self.layers
        for layer in range(self.layers):
            if layer not in self.layers_without_kv and self.source(layer) == layer:
                kinds[layer] = KVKind(windows[layer], *self.heads_of(layer))
        return kinds

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return a layer's K/V heads and their size."""
        return self.heads[layer] if self.heads else (self.kv_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """Return the layer whose K/V this one reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def index_keys_of(self, layer: int) -> int | None:
        """Return the layer that stands for the keys of a layer's own indexer; None without."""
        if layer not in self.indexed:
            return None
        return self.layers - len(self.indexed) + self.indexed.index(layer)

    @property
    def num_appending_layers(self) -> int:
        """Number of layers up to the last that has K/V or recurrent state of its own."""
        idle = set(self.layers_without_kv) - set(self.recurrent)
        return max(layer for layer in range(self.layers) if self.source(layer) == layer and layer not in idle) + 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a sequence."""
        return 4 * sum(mixer.sizes.state for mixer in self.mixers)  # float32

    def row_bytes(self, kind: KVKind) -> int:
        """Return the bytes of an entry in one layer."""
        return self.format.row_bytes(kind.kv_heads, kind.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return sum(self.row_bytes(kind) for kind in self.kinds if kind is not None)
