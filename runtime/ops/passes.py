"""What a pass through the layers knows of its rows: whose they are, where they attend, and where K/V are kept.

A row belongs to a phase, and that alone decides how it attends: prefill rows are a prompt's, decode rows the next token
of a sequence, alone or with up to 15 guesses behind it that are to be verified. On the native kernels a row of a phase
has the same bits however many rows are in its pass, wherever a prompt was cut, and whatever the number of threads.

K/V are kept in blocks of BLOCK entries. A block holds them for a group of layers, those that attend through the same
window; it lies in one of the group's slabs, and a sequence's table says which blocks hold its entries. Nothing here
decides which block is whose: the pool does.
L = layers of a group, Hkv = key/value heads, D = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from headrace.runtime.ops.kv_format import KVFormat

BLOCK = 128  # entries: the kernels' chunk, so that a chunk lies in one block

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows of a pass: `count` >= 1 new tokens at positions [offset, offset + count).

    tables: for each layer group, the id of the block with the entries [i * BLOCK, (i + 1) * BLOCK) at index i, up to
    offset + count at least; -1 for a block that the group's window has left behind.
    """

    count: int
    offset: int
    phase: Phase
    tables: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class KVGroup:
    """The K/V of the layers that share a window.

    slabs: each (blocks, L, 2, Hkv, BLOCK, D), or as the format packs blocks, made by `Ops.slab`. Ids of blocks count
    through them in their order.
    """

    window: int | None
    layers: list[int]
    block_shape: tuple[int, ...]  # `KVFormat.block_shape`: (L, 2, Hkv, BLOCK, D) unless packed
    slabs: list[mx.array] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """How many the slabs have."""
        return sum(slab.shape[0] for slab in self.slabs)

    def find(self, block: int) -> tuple[int, int]:
        """(index of its slab, index in it). Raises ValueError for an id that no slab has."""
        if block >= 0:
            for number, slab in enumerate(self.slabs):
                if block < slab.shape[0]:
                    return number, block
                block -= slab.shape[0]
        raise ValueError("a table names a block that no slab has")


class KVStore:
    """The K/V of all sequences, by layer groups. `windows`: each layer's, None for none."""

    def __init__(self, windows: Sequence[int | None], kv_heads: int, head_dim: int, kv: KVFormat) -> None:
        self.format = kv
        self.kv_heads, self.head_dim = kv_heads, head_dim
        kinds = dict.fromkeys(windows)
        members = {kind: [i for i, window in enumerate(windows) if window == kind] for kind in kinds}
        self.groups = [
            KVGroup(kind, layers, kv.block_shape(len(layers), kv_heads, BLOCK, head_dim))
            for kind, layers in members.items()
        ]
        order = list(kinds)
        # Of each layer: its group, its index there.
        self.places = [(order.index(window), members[window].index(i)) for i, window in enumerate(windows)]

    def block(self, group: int, block: int) -> mx.array:
        """A block's entries, of its group's shape: to be evaluated before what they hold is written over."""
        slab, index = self.groups[group].find(block)
        return self.groups[group].slabs[slab][index]


class Pass:
    """The rows of one pass: x is (1, N, E), the rows of each sequence one after the other. Made anew for every pass.

    It has the tables and slabs of the moment it was made: both may grow while the pass runs.
    """

    __slots__ = ("held", "sequences", "store")

    def __init__(self, sequences: Sequence[SequenceRows], store: KVStore) -> None:
        self.sequences = [
            SequenceRows(rows.count, rows.offset, rows.phase, [list(table) for table in rows.tables])
            for rows in sequences
        ]
        self.store = store
        self.held: Any = None  # what operations make of it

    @property
    def rows(self) -> int:
        """N."""
        return sum(rows.count for rows in self.sequences)
