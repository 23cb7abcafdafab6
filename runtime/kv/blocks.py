"""The blocks of one layer group, as numbers: who holds how many, and which may be given to others.

Every block is in one of three states: free (it holds nothing), used (`count` sequences hold it), or cached (nobody
holds it, but what it holds is known and may be found again, until the block is wanted for something else).
free + used + cached = total, always. No arrays: numbers only.
"""

from heapq import heappop, heappush


class Blocks:
    """Blocks 0 to total - 1. `most` bounds the total; above `kept`, cached blocks are given up rather than it grows."""

    def __init__(self, most: int, kept: int | None = None) -> None:
        if most < 1:
            raise ValueError(f"a pool needs at least one block, not {most}")
        self.most = most
        self.kept = most if kept is None else kept
        self._counts: list[int] = []
        self._known: list[bool] = []  # what it holds may be looked for
        self._free: list[int] = []  # a heap: low numbers are given first, so that what is allocated last empties first
        self._cached: dict[int, None] = {}  # least recently used first
        self.shared = 0  # held more than once

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
        """How many can be allocated in a row: free ones, cached ones given up, and those yet to be set aside."""
        return self.free + self.cached + self.most - self.total

    @property
    def oldest(self) -> int | None:
        """The cached block that nobody has used for longest."""
        return next(iter(self._cached), None)

    @property
    def grows(self) -> bool:
        """Whether the next block is to be a new one."""
        return not self._free and self.total < (self.most if not self._cached else min(self.kept, self.most))

    def count(self, block: int) -> int:
        """How many hold it."""
        return self._counts[block]

    def known(self, block: int) -> bool:
        """Whether what it holds may be looked for: then it is not written to."""
        return self._known[block]

    def grow(self, blocks: int) -> None:
        """So many more, free. Raises ValueError past `most`."""
        if self.total + blocks > self.most:
            raise ValueError(f"{self.total} blocks cannot become {blocks} more, with {self.most} at most")
        for block in range(self.total, self.total + blocks):
            self._counts.append(0)
            self._known.append(False)
            heappush(self._free, block)

    def shrink(self, total: int) -> None:
        """Only the first `total` blocks remain. Raises ValueError where another one is not free."""
        gone = self.total - total
        kept = [block for block in self._free if block < total]
        if gone < 0 or len(self._free) - len(kept) != gone:
            raise ValueError(f"of {self.total} blocks not all past {total} are free")
        self._free = sorted(kept)
        del self._counts[total:], self._known[total:]

    def free_from(self) -> int:
        """The number from which on every block is free."""
        free = set(self._free)
        return next((block + 1 for block in range(self.total - 1, -1, -1) if block not in free), 0)

    def allocate(self) -> int | None:
        """The lowest free block, now held once; None where none is free."""
        if not self._free:
            return None
        block = heappop(self._free)
        self._counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holds it. Raises ValueError for a free block: it holds nothing."""
        if self._counts[block] == 0 and not self._known[block]:
            raise ValueError(f"block {block} is free: there is nothing to share")
        self._cached.pop(block, None)
        self._counts[block] += 1
        self.shared += self._counts[block] == 2

    def release(self, block: int) -> None:
        """One holds it no longer; nobody at all: it is cached where it is known, else free."""
        if self._counts[block] == 0:
            raise ValueError(f"nobody holds block {block}")
        self._counts[block] -= 1
        self.shared -= self._counts[block] == 1
        if self._counts[block] == 0:
            if self._known[block]:
                self._cached[block] = None
            else:
                heappush(self._free, block)

    def learn(self, block: int) -> None:
        """What it holds is known from now on. Raises ValueError where nobody holds it."""
        if self._counts[block] == 0:
            raise ValueError(f"nobody holds block {block}")
        self._known[block] = True

    def forget(self, block: int) -> None:
        """What it holds is not to be found any more; a cached block is free with that."""
        if self._known[block] and self._counts[block] == 0:
            del self._cached[block]
            heappush(self._free, block)
        self._known[block] = False
