"""The arrays of a pool's blocks: slabs of a few blocks each, per layer group.

Contract: blocks are numbered through the slabs of a group in order; slabs are added and removed at the end. Growth
copies no entry. Each pass waits for the one before it, since kernels write slabs in place, outside the graph.

`BlockPool` alone decides which block is used; this class has its memory. `newest` links passes in MLX's graph: every
read or write on the host has to `settle` first.

Guards: tests/runtime/kv/test_paged.py and tests/runtime/engine/test_pool_full.py.
"""

import sys
from collections.abc import Callable

import mlx.core as mx

from headrace.runtime.kv.cache import KVShape
from headrace.runtime.ops import BLOCK, KVStore, Ops

# Blocks of a slab at most; a group's first slab has two, and each later one as many as there are by then. Slabs are
# freed whole, so large ones would keep more memory.
MAX_SLAB = 8


class PagedArrays:
    """Slabs of all layer groups. spare: bytes that all slabs may take; None for no bound."""

    def __init__(self, shape: KVShape, ops: Ops, spare: Callable[[], int] | None = None) -> None:
        self.shape = shape
        self.ops = ops
        self.store = KVStore(shape.kinds, shape.format, shape.kv_sources)
        self.newest: mx.array | None = None  # the output of the last layer that appended; its pass may be in flight
        self._spare = spare

    def fresh_states(self) -> list[mx.array]:
        """Return the recurrent state of a sequence without entries, one array a layer that has some."""
        return [mx.zeros((mixer.sizes.state,), mx.float32) for mixer in self.shape.mixers]

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer group."""
        return [group.kind.window for group in self.store.groups]

    @property
    def excess(self) -> int:
        """Bytes beyond `spare`; negative if more may be allocated."""
        if self._spare is None:
            return -sys.maxsize
        return self.nbytes - self._spare()

    def allocate(self, group: int, blocks: int) -> int:
        """Add a slab of at most `blocks` blocks, and return its size; 0 if no memory is spare."""
        stored = self.store.groups[group]
        # As many as there are already: a short chat takes little memory, a long one few allocations.
        blocks = min(blocks, MAX_SLAB, max(2, stored.blocks), -self.excess // self.block_bytes(group))
        if blocks <= 0:
            return 0
        stored.slabs.append(self.ops.slab(blocks, stored.block_shape, self.shape.format.dtype))
        return blocks

    def free_slabs(self, group: int, num_needed: int) -> int:
        """Free the group's last slabs without any of its first `num_needed` blocks; return how many blocks remain."""
        self.settle()
        stored = self.store.groups[group]
        while stored.slabs and stored.blocks - stored.slabs[-1].shape[0] >= num_needed:
            stored.slabs.pop()
        return stored.blocks

    def settle(self) -> None:
        """Wait for all passes in flight."""
        if self.newest is not None:
            mx.eval(self.arrays)
            self.newest = None

    def copy(self, group: int, source: int, target: int, entries: int) -> None:
        """Copy the first `entries` of one block into another."""
        self.write(group, target, self.read(group, source, entries))

    def read(self, group: int, block: int, entries: int) -> mx.array:
        """Return the first entries (layers, 2, Hkv, entries, D), or a whole packed block (`KVFormat.part_shape`)."""
        self.settle()
        stored = self.store.block(group, block)
        if self.shape.format.packed:  # whole: codes of several entries may share a word
            return stored
        return stored[..., :entries, :]

    def read_alone(self, group: int, block: int, entries: int) -> mx.array:
        """Return `read` without content of other sequences: zeros after a packed block's first entries."""
        stored = self.read(group, block, entries)
        if self.shape.format.packed and entries < BLOCK:
            return self.ops.cut_block(self.store, group, stored, entries)
        return stored

    def write(self, group: int, block: int, entries: mx.array) -> None:
        """Write what `read` returns into a block, at once."""
        self.settle()
        self.ops.write_block(self.store, group, block, entries)

    @property
    def arrays(self) -> list[mx.array]:
        """All slabs, after all appends."""
        arrays = [slab for group in self.store.groups for slab in group.slabs]
        if self.newest is None or not arrays:
            return arrays
        ordered: list[mx.array] = mx.depends(arrays, self.newest)
        return ordered

    def block_bytes(self, group: int) -> int:
        """Return the bytes of a block of a group."""
        stored = self.store.groups[group]
        return len(stored.layers) * BLOCK * self.shape.row_bytes(stored.kind)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for group in self.store.groups for slab in group.slabs)
