"""The block pool: allocation, sharing and eviction of K/V blocks, and lookup of cached prefixes.

Contract. A sequence uses one block per BLOCK entries in every layer group (the layers of one attention window). Only
its single user may write to a block, and only until the block is cached. `cache_blocks` makes content available to
lookups, while the block is used and until it is evicted: least recently used first, the end of a path before its
beginning. One thread.

    GroupBlocks   free -> used (by n sequences) -> cached -> free, by number; one a layer group
    PrefixIndex   tokens -> nodes with a block in each group
    PagedArrays   the memory of the blocks

`BlockTable` (native kernels) and `SlotCache` (stock MLX, which copies) use the pool; a backend owns it.
tests/runtime/kv/test_block_table.py and test_slot_cache.py guard it.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import mlx.core as mx

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.cache import first_visible
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.kv.prefix_index import PrefixIndex, PrefixNode, PrefixPath, matching_entries
from headrace.runtime.metrics.cost import BESIDE_WINDOW
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.ops import BLOCK

MOST_STATE_BYTES = 512 << 20  # of recurrent state kept for lookups: one state is far larger than one K/V entry


class GroupBlocks:
    """Reference counts and free list of the blocks of one layer group: numbers only, no arrays.

    A block is free (no content), used (by `count` sequences), or cached (unused, but its content can be looked up until
    the block is reallocated). free + used + cached = total. Blocks are numbered from 0.

    max_total: bounds their number.
    max_cached_total: above so many blocks, cached ones are evicted before others are made. None: as `max_total`.
    """

    def __init__(self, max_total: int, max_cached_total: int | None = None) -> None:
        if max_total < 1:
            raise ValueError(f"a pool needs at least one block, not {max_total}")
        self.max_total = max_total
        self.max_cached_total = max_total
        if max_cached_total is not None:
            self.max_cached_total = min(max_total, max_cached_total)
        self._counts: list[int] = []
        self._indexed: list[bool] = []  # can be looked up
        self._free: list[int] = []  # a heap: low numbers are allocated first, so that the last slabs empty first
        self._cached: dict[int, None] = {}  # least recently used first
        self.shared = 0  # blocks with a count above 1

    @property
    def total(self) -> int:
        return len(self._counts)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that can still be allocated: free, cached, and not yet created."""
        return self.free + self.cached + self.max_total - self.total

    @property
    def oldest(self) -> int | None:
        """The least recently used cached block."""
        return next(iter(self._cached), None)

    @property
    def grows(self) -> bool:
        """True if the next allocation needs a new block."""
        bound = self.max_cached_total if self._cached else self.max_total
        return not self._free and self.total < bound

    def count(self, block: int) -> int:
        """Return the number of sequences that use the block."""
        return self._counts[block]

    def indexed(self, block: int) -> bool:
        """Return whether the block can be looked up; it is then read-only."""
        return self._indexed[block]

    def grow(self, blocks: int) -> None:
        """Add free blocks. Raises ValueError past `max_total`."""
        if self.total + blocks > self.max_total:
            raise ValueError(f"{self.total} blocks cannot become {blocks} more, with {self.max_total} at most")
        for block in range(self.total, self.total + blocks):
            self._counts.append(0)
            self._indexed.append(False)
            heappush(self._free, block)

    def shrink(self, total: int) -> None:
        """Remove all blocks but the first `total`. Raises ValueError if one of them is not free."""
        # Only whole runs at the end are removed: numbers of other blocks stay.
        removed = self.total - total
        free = [block for block in self._free if block < total]
        if removed < 0 or len(self._free) - len(free) != removed:
            raise ValueError(f"of {self.total} blocks not all past {total} are free")
        self._free = sorted(free)
        del self._counts[total:], self._indexed[total:]

    def free_from(self) -> int:
        """Return the number from which on every block is free."""
        free = set(self._free)
        return next((block + 1 for block in range(self.total - 1, -1, -1) if block not in free), 0)

    def allocate(self) -> int | None:
        """Allocate the lowest free block; None if there is none."""
        if not self._free:
            return None
        block = heappop(self._free)
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more user. Raises ValueError for a free block."""
        if self._counts[block] == 0 and not self._indexed[block]:
            raise ValueError(f"block {block} is free: there is nothing to share")
        self._cached.pop(block, None)
        self._counts[block] += 1
        self.shared += self._counts[block] == 2

    def release(self, block: int) -> None:
        """Count one user less; an unused block becomes cached if indexed, else free."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is not in use")
        self._counts[block] -= 1
        self.shared -= self._counts[block] == 1
        if self._counts[block] == 0:
            if self._indexed[block]:
                self._cached[block] = None
            else:
                heappush(self._free, block)

    def mark_cached(self, block: int) -> None:
        """Make the block's content available to lookups. Raises ValueError for an unused block."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is not in use")
        self._indexed[block] = True

    def evict(self, block: int) -> None:
        """Remove the block's content from lookups; a cached block becomes free."""
        if self._indexed[block] and self._counts[block] == 0:
            del self._cached[block]
            heappush(self._free, block)
        self._indexed[block] = False


class BlockPool:
    """Blocks of one network, by layer group.

    windows: the window of each group.
    max_blocks: bounds by group.
    storage: the arrays of the blocks; if it allocates none, cached blocks are evicted.
    key: identity of the K/V (weights, format, kernels).
    max_cached: bounds by group above which cached blocks are evicted.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        max_blocks: Sequence[int],
        storage: PagedArrays,
        key: bytes = b"",
        max_cached: Sequence[int] | None = None,
    ) -> None:
        self.windows = tuple(windows)
        self.groups = [GroupBlocks(*bounds) for bounds in zip(max_blocks, max_cached or max_blocks, strict=True)]
        self.storage = storage  # `groups` and its slabs have as many blocks, changed together here
        self.index = PrefixIndex(key)
        self._nodes: list[dict[int, PrefixNode]] = [{} for _ in windows]  # of each group: block -> its node
        self._stateful: dict[PrefixNode, None] = {}  # with recurrent state, least recently used first

    @property
    def stats(self) -> PoolStats:
        groups = self.groups
        return PoolStats(
            used=sum(group.used for group in groups),
            shared=sum(group.shared for group in groups),
            cached=sum(group.cached for group in groups),
            free=sum(group.free for group in groups),
        )

    def allocate(self, group: int) -> int:
        """Allocate a free block, a new one, or the least recently used cached one.

        Raises PoolFullError if all blocks are in use, and errors of `storage`; nothing changed then.
        """
        blocks = self.groups[group]
        if blocks.grows:
            blocks.grow(self.storage.allocate(group, blocks.max_total - blocks.total))
        if not blocks.free and (oldest := blocks.oldest) is not None:
            self._evict(group, oldest)
        block = blocks.allocate()
        if block is None:
            raise PoolFullError(f"all {blocks.max_total} blocks of {BLOCK} K/V entries are in use")
        return block

    def share(self, group: int, block: int) -> None:
        """Count one more user of a used or cached block."""
        self.groups[group].share(block)

    def release(self, group: int, block: int) -> None:
        """Count one user less. A sequence releases its last block first."""
        self.groups[group].release(block)

    def may_write(self, group: int, block: int) -> bool:
        """Return whether the block's user may write to it; otherwise into a copy."""
        return self.groups[group].count(block) == 1 and not self.groups[group].indexed(block)

    def cache_blocks(
        self, parent: PrefixNode, tokens: Sequence[int], decode_written: bytes, blocks: Sequence[int | None]
    ) -> PrefixNode | None:
        """Make entries available to lookups, and return their node; None if `parent` was removed.

        The node may already have other blocks with the same content.
        parent: the node of the block before, or the root.
        tokens: of the entries, 1 to BLOCK.
        decode_written: of each entry, see `PrefixNode`.
        blocks: one of each group, used by the caller; None for a group without.
        """
        if parent is not self.index.root and parent.parent is None:
            return None
        node = self.index.add(parent, tokens, decode_written, len(blocks))
        for group, block in enumerate(blocks):
            if block is not None and node.blocks[group] is None and not self.groups[group].indexed(block):
                self.groups[group].mark_cached(block)
                self._nodes[group][block] = node
                node.blocks[group] = block
        return node

    def keep_states(self, node: PrefixNode, states: Sequence[mx.array]) -> None:
        """Keep the recurrent state after a node's last entry; old ones are dropped above MOST_STATE_BYTES."""
        node.states = [mx.contiguous(state) for state in states]  # a part of an array would keep all of it in memory
        mx.eval(node.states)
        self._stateful.pop(node, None)
        self._stateful[node] = None
        while len(self._stateful) > max(1, MOST_STATE_BYTES // self.storage.shape.state_bytes):
            oldest = next(iter(self._stateful))
            del self._stateful[oldest]
            oldest.states = None
            self.prune(oldest)

    def states_of(self, node: PrefixNode) -> list[mx.array] | None:
        """Return the recurrent state after a node's last entry, if kept, as the most recently used one."""
        if node in self._stateful:  # to the end of the dictionary, whose first node is dropped first
            del self._stateful[node]
            self._stateful[node] = None
        return node.states

    def lookup(self, tokens: Sequence[int], *, answers: bool = False) -> PrefixPath:
        """Return the longest cached prefix of `tokens` that has all K/V in the windows, and recurrent state.

        answers: include decode-written entries; else every bit equals a cold prefill.
        """
        # A path without all K/V or the state is shortened by a block at a time.
        path = self._to_states(self.index.find(tokens, answers), tokens, answers)
        while path:
            length = matching_entries(path)
            if all(self._complete(group, path, length) for group in range(len(self.windows))):
                return path
            path = self._to_states(path[:-1], tokens, answers)
        return []

    def _to_states(self, path: PrefixPath, tokens: Sequence[int], answers: bool) -> PrefixPath:
        """Return the longest path along `tokens` that ends where recurrent state is kept; `path` without such layers.

        It is no longer than `path`, and shares all of it but the end: another node there may have the state.
        """
        while path and self.storage.shape.mixers:
            # A state cannot be cut, so a node has to match whole: the longest one here, else one of a block earlier.
            first = (len(path) - 1) * BLOCK
            rest = tokens[first : first + BLOCK]
            parents = [self.index.root, *(node for node, _ in path[:-1])]
            ends = [
                node
                for node in parents[-1].children_by_token.get(rest[0], ())
                if node.states is not None and node.common(rest, answers) == len(node.tokens)
            ]
            if ends:
                longest = max(ends, key=lambda node: len(node.tokens))
                return [*path[:-1], (longest, len(longest.tokens))]
            path = path[:-1]
        return path

    def _complete(self, group: int, path: PrefixPath, length: int) -> bool:
        """Return whether the group has every block that the token after `length` entries attends to."""
        first = first_visible(length, self.windows[group]) // BLOCK
        return all(node.blocks[group] is not None for node, _ in path[first:])

    def clear(self) -> None:
        """Evict everything, and free the memory of unused blocks."""
        self.evict_all()
        self.free_slabs()

    def evict_all(self) -> None:
        """Evict everything: nodes refer to each other, so the states of a pool that is just dropped stay a while."""
        for node in list(self.index.root.children.values()):
            self._remove(node)

    def free_slabs(self) -> None:
        """Free the last slabs, as far as their blocks are neither used nor cached."""
        for group, blocks in enumerate(self.groups):
            blocks.shrink(self.storage.free_slabs(group, blocks.free_from()))

    def evict_from(self, group: int, first: int) -> None:
        """Evict the group's blocks from number `first` on."""
        for block in [block for block in self._nodes[group] if block >= first]:
            if block in self._nodes[group]:  # not evicted with an earlier one
                self._evict(group, block)

    def _evict(self, group: int, block: int) -> None:
        """Evict a block, and without a window all blocks after it."""
        node = self._nodes[group].pop(block)
        node.blocks[group] = None
        self.groups[group].evict(block)
        if self.windows[group] is None:
            self._remove(node)
            return
        # A windowed group alone lost its block: the node stays while it has others.
        self.prune(node)

    def prune(self, node: PrefixNode | None) -> None:
        """Remove a node without blocks, state and nodes after it, then those before it that are so without it.

        The nodes of a pool without layer groups have states alone: one without is of use only to a sequence that goes
        on after it, and nothing evicts it later.
        """
        while node is not None and node.parent is not None:
            if node.children or node.states is not None or any(block is not None for block in node.blocks):
                return
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: PrefixNode) -> None:
        """Remove a node and all after it from the index: blocks that no sequence uses become free."""
        for removed in self.index.remove(node):
            removed.states = None
            self._stateful.pop(removed, None)
            for group, block in enumerate(removed.blocks):
                if block is not None:
                    del self._nodes[group][block]
                    self.groups[group].evict(block)


def make_pool(storage: PagedArrays, entries: int, key: bytes = b"", cached_entries: int | None = None) -> BlockPool:
    """Return a pool for concurrent sequences.

    storage: the arrays of its blocks.
    entries: of all sequences together.
    key: identity of the K/V on disk.
    cached_entries: blocks stay cached as long as there are no more than one sequence of this length takes; in a group
        with a window, than two sequences take. None: as long as there is room.
    """
    windows = storage.windows
    max_blocks = [-(-entries // BLOCK)] * len(windows)
    if cached_entries is None:
        return BlockPool(windows, max_blocks, storage, key)
    max_cached = []
    for window in windows:
        span = cached_entries
        if window is not None:
            span = min(span, 2 * (window + BESIDE_WINDOW))
        max_cached.append(-(-span // BLOCK) + 1)  # rounded up, and a block to copy a shared one
    return BlockPool(windows, max_blocks, storage, key, max_cached)
