"""The blocks of one sequence: which one holds which entries, in every layer group.

Contract: that of a `Cache` (`runtime.kv.cache`) as far as it is numbers. In each group `tables` has a block for every
BLOCK entries, LEFT for those that the group's window has left behind. Blocks are allocated by `reserve` and go back as
soon as no entry of the sequence is in them; what others may read is copied before it is written to, by `storage`.
Between a commit and the next `reserve`, `publish` can say which tokens the entries are of.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.cache import Lengths
from headrace.runtime.kv.chain import Link
from headrace.runtime.kv.pool import BlockPool, Found
from headrace.runtime.metrics.cost import ROLLBACK
from headrace.runtime.ops import BLOCK, Phase

LEFT = -1


class Storage(Protocol):
    """What is behind the numbers."""

    def settle(self) -> None:
        """Wait for passes that were started: blocks they write to may then go to others."""
        ...

    def copy(self, group: int, source: int, target: int, entries: int) -> None:
        """The first `entries` of one block into another."""
        ...


class Tables(Lengths):
    """One sequence's blocks of `pool`, to be given back with `close`."""

    def __init__(self, pool: BlockPool, storage: Storage, limit: int) -> None:
        super().__init__(limit)
        self.pool = pool
        self.tables: list[list[int]] = [[] for _ in pool.windows]
        self.left = [0] * len(pool.windows)  # how many blocks each group's window has left
        self._storage = storage
        self._links: list[Link | None] = []  # of each full block that was published
        self._answered = bytearray()  # of each entry, whether a decode step wrote it
        self._phase: Phase = "prefill"

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """Blocks for `tokens` more entries, up to the limit. Raises PoolFullError, holding nothing more than before."""
        self._phase = phase
        self._leave()
        end = min(self.length + tokens, self.limit)
        try:
            for group, table in enumerate(self.tables):
                self._own_last(group, table)
                while len(table) * BLOCK < end:
                    table.append(self.pool.allocate(group))
        except BaseException:
            self._release_past(self.length)
            raise

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self._answered += (b"\1" if self._phase == "decode" else b"\0") * tokens

    def rollback(self) -> None:
        pending = self.length > self.committed
        super().rollback()
        self._shorten(pending)

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries, drop the rest. Raises ValueError past what is `reachable`."""
        if 0 < length <= self.committed and not self.reachable(length):
            raise ValueError(f"the cache has dropped what it would need to go back to {length} entries")
        pending = self.length > self.committed
        super().trim(length)
        self._shorten(pending)

    def begin_again(self) -> None:
        """Drop every entry, for the network to append them anew up to the same length, in passes of their own."""
        self.length = 0
        self._shorten(pending=True)

    def reachable(self, length: int) -> int:
        """The most of the first `length` committed entries that `trim` can keep: 0 where a window there lacks some."""
        for window, left in zip(self.pool.windows, self.left, strict=True):
            if window is not None and left * BLOCK > max(0, length - window + 1):
                return 0
        return length

    def resume(self, tokens: Sequence[int], *, answers: bool = False) -> int:
        """Begin with what the pool has of `tokens`, committed: how many entries. See `BlockPool.lookup`.

        Whole blocks are shared, of the last one a part is copied, where there is a block for it.
        """
        if self.length or self.committed:
            raise ValueError("only an empty cache can begin with what others left")
        found = self.pool.lookup(tokens, answers=answers)
        try:
            self._take(found)
        except BaseException:
            self.close()
            raise
        return self.length

    def publish(self, tokens: Sequence[int], *, end: bool = False) -> None:
        """The committed entries are those of the first of `tokens`: others may begin with the full blocks of them.

        `end`: nothing is appended any more, so with the block that is not full, too.
        """
        last = -(-self.committed // BLOCK) if end else self.committed // BLOCK
        for index in range(len(self._links), last):
            before = self._links[-1] if self._links else None
            if index and before is None:
                return  # others needed the place of what came before: nobody would find this
            entries = slice(index * BLOCK, min((index + 1) * BLOCK, self.committed))
            blocks = [None if table[index] == LEFT else table[index] for table in self.tables]
            link = self.pool.publish(before, tokens[entries], bytes(self._answered[entries]), blocks)
            if entries.stop - entries.start == BLOCK:
                self._links.append(link)

    def close(self) -> None:
        """Give every block back."""
        self.length = self.committed = 0
        self._shorten(pending=True)

    @property
    def blocks(self) -> int:
        """How many blocks it holds, all groups."""
        return sum(len(table) - left for table, left in zip(self.tables, self.left, strict=True))

    def _leave(self) -> None:
        """Give back what windows have left behind, but for what going back takes."""
        for group, window in enumerate(self.pool.windows):
            if window is None:
                continue
            table, committed = self.tables[group], min(self.committed, self.length)
            for index in range(self.left[group], max(0, committed - window + 1 - ROLLBACK) // BLOCK):
                self.pool.release(group, table[index])
                table[index] = LEFT
                self.left[group] = index + 1

    def _own_last(self, group: int, table: list[int]) -> None:
        """The block that the next entry goes to must be written to by nobody else, and be looked for by nobody."""
        index, entries = divmod(self.length, BLOCK)
        if entries == 0 or self.pool.may_write(group, table[index]):
            return
        own = self.pool.allocate(group)
        self._storage.copy(group, table[index], own, entries)
        self.pool.release(group, table[index])
        table[index] = own

    def _take(self, found: Found) -> None:
        whole, length = found.length // BLOCK, found.length
        for group, table in enumerate(self.tables):
            self.left[group] = self._first_there(group, found.links[:whole], length)
            table += [LEFT] * self.left[group]
            for link in found.links[self.left[group] : whole]:
                block = link.blocks[group]
                assert block is not None
                self.pool.share(group, block)
                table.append(block)
        if whole < len(found.links) and not self._copy_part(found.links[-1], length % BLOCK):
            length = self.reachable(whole * BLOCK)
        self._links = list(found.links[: length // BLOCK])
        self._answered += b"".join(link.answered for link in found.links)[:length]
        self.length = self.committed = length
        self._release_past(length)

    def _copy_part(self, link: Link, entries: int) -> bool:
        """The first entries of a link's blocks into blocks of its own; False where there are none to be had."""
        sources = [(group, block) for group, block in enumerate(link.blocks) if block is not None]
        for group, block in sources:
            self.pool.share(group, block)  # so that it is not what gives place to its own copy
        try:
            for group, block in sources:
                self.tables[group].append(self.pool.allocate(group))
                self._storage.copy(group, block, self.tables[group][-1], entries)
        except PoolFullError:
            return False
        finally:
            for group, block in sources:
                self.pool.release(group, block)
        return True

    def _first_there(self, group: int, links: Sequence[Link], length: int) -> int:
        """From which block on the group has all of them: as far back as a sequence that got here itself would have."""
        window = self.pool.windows[group]
        if window is None:
            return 0
        first, least = len(links), max(0, length - window + 1 - ROLLBACK) // BLOCK
        while first > least and links[first - 1].blocks[group] is not None:
            first -= 1
        return first

    def _shorten(self, pending: bool) -> None:
        if pending and any(len(table) * BLOCK >= self.length + BLOCK for table in self.tables):
            self._storage.settle()  # what is under way may write to blocks that go back
        self._release_past(self.length)
        del self._answered[self.length :]
        del self._links[self.length // BLOCK :]

    def _release_past(self, length: int) -> None:
        """Give back the blocks in which there is no entry before `length`, the last one first."""
        kept = -(-length // BLOCK)
        for group, table in enumerate(self.tables):
            while len(table) > kept:
                block = table.pop()
                if block != LEFT:
                    self.pool.release(group, block)
            self.left[group] = min(self.left[group], len(table))
