"""Rows of a pass through the layers, with their phases, block tables and K/V blocks.

A row's phase decides how it attends: prefill rows belong to a prompt; decode rows are a sequence's next token and up to
15 draft tokens. On the native kernels a row has the same bits for any batch, prompt split and number of threads.

K/V are stored in blocks of BLOCK entries for a group of layers with equal windows and heads. Blocks lie in the group's
slabs; a sequence's block tables list its blocks. The pool in `runtime.kv` assigns them.

`runtime.kv.paged` makes a `Pass` for `Ops.attend_pass` and `LayersNode.run_pass`. To find an entry: position // BLOCK
is an index in the table of the layer's group, the id there gives slab and block (`KVGroup.find`), and
`KVStore.locations` the layer's index in them.
L = layers of a group, Hkv = key/value heads, D = head dimension.

Guard: tests/runtime/ops/test_passes.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import mlx.core as mx
from msgspec import Struct, field

from headrace.runtime.ops.kv_format import KVFormat

if TYPE_CHECKING:
    from headrace.runtime import _native

BLOCK = 128  # entries: one chunk of the attention kernels (runtime/native), which sum by chunks

Phase = Literal["prefill", "decode"]


class SequenceRows(Struct, frozen=True):
    """One sequence's rows of a pass: `count` >= 1 new tokens at positions [offset, offset + count).

    tables: per layer group, block ids; index i is for entries [i * BLOCK, (i + 1) * BLOCK), up to offset + count at
    least. -1 stands for a block that the group's window has passed.
    """

    count: int
    offset: int
    phase: Phase
    tables: Sequence[Sequence[int]]


class KVKind(Struct, frozen=True):
    """A layer's attention window, None for none, and the shape of its entries."""

    window: int | None
    kv_heads: int
    head_dim: int


def grouped(kinds: Sequence[KVKind | None]) -> dict[KVKind, list[int]]:
    """Return the layers of each kind. kinds: of each layer, None without K/V of its own."""
    groups: dict[KVKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is not None:
            groups.setdefault(kind, []).append(layer)
    return groups


class KVGroup(Struct, eq=False):
    """The K/V of the layers of one kind.

    slabs: arrays of `Ops.slab`, each (blocks, L, 2, Hkv, BLOCK, D), or packed blocks. Block ids number the blocks of
    all slabs in order.
    """

    kind: KVKind
    layers: list[int]
    block_shape: tuple[int, ...]  # `KVFormat.block_shape`: (L, 2, Hkv, BLOCK, D) unless packed
    slabs: list[mx.array] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Number of blocks in all slabs."""
        return sum(slab.shape[0] for slab in self.slabs)

    def find(self, block: int) -> tuple[int, int]:
        """Return (slab index, index in the slab). Raises ValueError for an unknown id."""
        if block >= 0:
            for number, slab in enumerate(self.slabs):
                if block < slab.shape[0]:
                    return number, block
                block -= slab.shape[0]
        raise ValueError("block table has an unknown block")


class KVStore:
    """The K/V of all sequences, by layer groups.

    kinds: of each layer, None without K/V of its own.
    kv: the format.
    sources: for each layer the one whose K/V it reads; (): each reads its own.
    """

    def __init__(self, kinds: Sequence[KVKind | None], kv: KVFormat, sources: Sequence[int] = ()) -> None:
        self.format = kv
        self.groups = [
            KVGroup(kind, layers, kv.block_shape(len(layers), kind.kv_heads, BLOCK, kind.head_dim))
            for kind, layers in grouped(kinds).items()
        ]
        # Per layer: (group, index in the group); (-1, -1) without K/V.
        self.locations = [(-1, -1)] * len(kinds)
        for number, group in enumerate(self.groups):
            for index, layer in enumerate(group.layers):
                self.locations[layer] = number, index
        if sources:
            self.locations = [self.locations[source] for source in sources]

    def block(self, group: int, block: int) -> mx.array:
        """Return a block's entries lazily; evaluate them before the block is overwritten."""
        slab, index = self.groups[group].find(block)
        return self.groups[group].slabs[slab][index]


class Pass:
    """The rows of one pass: x is (1, N, E), sequence after sequence.

    Block tables are copied, since they may grow while the pass runs. wanted: rows of which the last layer's output is
    used, the first ones.
    """

    __slots__ = ("native", "sequences", "store", "wanted")

    def __init__(self, sequences: Sequence[SequenceRows], store: KVStore, wanted: int | None = None) -> None:
        self.sequences = [
            SequenceRows(rows.count, rows.offset, rows.phase, [list(table) for table in rows.tables])
            for rows in sequences
        ]
        self.store = store
        self.wanted = self.rows
        if wanted is not None:
            self.wanted = wanted
        self.native: _native.Pass | None = None  # the pass in the native kernels' form, made once

    @property
    def rows(self) -> int:
        """N, the rows of all sequences."""
        return sum(rows.count for rows in self.sequences)
