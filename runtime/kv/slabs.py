"""The arrays behind a pool's blocks: slabs of a few blocks each, per layer group.

Contract: blocks are numbered through the slabs of a group in order, so a slab is added at the end and goes from the
end. Growing copies no entry. Passes run one after the other: each waits for the one before it, whosever rows were in
that, since slabs may be written in place, outside the graph.
"""

from typing import cast

import mlx.core as mx

from headrace.runtime.kv.cache import KVShape
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.ops import BLOCK, KVStore, Ops

MOST = 8  # blocks of a slab; a group's first one has two, and slabs double up to this


class Slabs:
    """What `BlockPool` and `Tables` need of memory (`set_aside`, `Storage`), and passes of what was before them."""

    def __init__(self, shape: KVShape, ops: Ops) -> None:
        self.shape = shape
        self.ops = ops
        windows = shape.windows or (None,) * shape.layers
        self.store = KVStore(windows, shape.kv_heads, shape.head_dim, shape.format)
        self.newest: mx.array | None = None  # what the layer that appended last gave, of a pass that may be under way

    @property
    def windows(self) -> list[int | None]:
        """Of the layer groups."""
        return [group.window for group in self.store.groups]

    def set_aside(self, group: int, blocks: int) -> int:
        """A slab of at most so many blocks; how many it has."""
        held = self.store.groups[group]
        blocks = min(blocks, MOST, max(2, held.blocks))
        held.slabs.append(self.ops.slab(blocks, held.block_shape, self.shape.format.dtype))
        return blocks

    def give_back(self, pool: BlockPool) -> None:
        """Let go of the last slabs, as far as nothing in them is in use or cached."""
        self.settle()
        for group, blocks in zip(self.store.groups, pool.groups, strict=True):
            kept, needed = blocks.total, blocks.free_from()
            while group.slabs and kept - group.slabs[-1].shape[0] >= needed:
                kept -= group.slabs.pop().shape[0]
            blocks.shrink(kept)

    def settle(self) -> None:
        """Wait for the passes that were started."""
        if self.newest is not None:
            mx.eval(self.arrays)
            self.newest = None

    def copy(self, group: int, source: int, target: int, entries: int) -> None:
        """The first `entries` of one block into another."""
        self.write(group, target, self.read(group, source, entries))

    def read(self, group: int, block: int, entries: int) -> mx.array:
        """The first entries of a block (layers, 2, Hkv, entries, D), or all of a packed one (`KVFormat.part_shape`)."""
        self.settle()
        held = self.store.block(group, block)
        return held if self.shape.format.packed else held[..., :entries, :]

    def read_alone(self, group: int, block: int, entries: int) -> mx.array:
        """`read`, without a trace of what others left in the block: zeros behind a packed one's first entries."""
        held = self.read(group, block, entries)
        return self.ops.cut_block(self.store, held, entries) if self.shape.format.packed and entries < BLOCK else held

    def write(self, group: int, block: int, entries: mx.array) -> None:
        """The same into a block, at once."""
        self.settle()
        self.ops.write_block(self.store, group, block, entries)

    @property
    def arrays(self) -> list[mx.array]:
        """All slabs, with what was appended."""
        held = [slab for group in self.store.groups for slab in group.slabs]
        return held if self.newest is None else cast(list[mx.array], mx.depends(held, self.newest))

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a group."""
        return len(self.store.groups[group].layers) * BLOCK * self.shape.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for group in self.store.groups for slab in group.slabs)
