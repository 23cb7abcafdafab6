"""Reference counts and free list of the blocks of one layer group.

A block is free (no content), used (by `count` sequences), or cached (unused, but its content can be looked up until the
block is reallocated). free + used + cached = total. Numbers only, no arrays.
"""

from heapq import heappop, heappush


class GroupBlocks:
    """Blocks 0 to total - 1. `max_total` bounds them; above `max_cached_total`, cached blocks are evicted first."""

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
