"""The block pool: which blocks there are, who holds them, and which prefixes of tokens they hold.

Contract. A sequence holds a block for each BLOCK of its entries in every layer group (layers that attend through the
same window). What it holds is its own to write to, unless others hold it too or it was published: then nobody does.
`publish` says what a block holds; from then on a lookup of tokens that begin like it finds it, while it is held and
after that until its place is needed. The least recently used goes first, and the end of a chain before its beginning.

Numbers only; `set_aside` is what makes arrays for them (`runtime.kv.slabs`). One thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.blocks import Blocks
from headrace.runtime.kv.chain import Chains, Link
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.ops import BLOCK


@dataclass(frozen=True, slots=True)
class Found:
    """The longest known beginning of some tokens: `length` entries in `links`, of the last one maybe only a part."""

    links: tuple[Link, ...] = ()
    length: int = 0


class BlockPool:
    """Blocks of one network. windows: of each layer group; most: how many blocks each may have.

    set_aside(group, blocks) makes at most so many more and says how many: with none, cached ones are given up. key:
    what must be equal for K/V to be (weights, format, kernels). kept: how many blocks of each group there may be for
    the sake of cached ones.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        most: Sequence[int],
        set_aside: Callable[[int, int], int],
        key: bytes = b"",
        kept: Sequence[int] | None = None,
    ) -> None:
        self.windows = tuple(windows)
        self.groups = [Blocks(*bounds) for bounds in zip(most, kept or most, strict=True)]
        self.chains = Chains(key)
        self._set_aside = set_aside
        self._links: list[dict[int, Link]] = [{} for _ in windows]  # of each group: block -> what it holds

    @property
    def stats(self) -> PoolStats:
        groups = self.groups
        return PoolStats(
            sum(group.used for group in groups),
            sum(group.shared for group in groups),
            sum(group.cached for group in groups),
            sum(group.free for group in groups),
        )

    def allocate(self, group: int) -> int:
        """A block that nobody else holds: a free one, a new one, or what was cached longest ago.

        Raises PoolFullError where all there may be are held, and whatever `set_aside` raises; nothing changed then.
        """
        blocks = self.groups[group]
        if blocks.grows:
            blocks.grow(self._set_aside(group, blocks.most - blocks.total))
        if not blocks.free and (oldest := blocks.oldest) is not None:
            self._forget(group, oldest)
        block = blocks.allocate()
        if block is None:
            raise PoolFullError(f"all {blocks.most} blocks of {BLOCK} K/V entries are in use")
        return block

    def share(self, group: int, block: int) -> None:
        """One more holds the block, which is held or known."""
        self.groups[group].share(block)

    def release(self, group: int, block: int) -> None:
        """One of its holders lets go of the block. Of several, the last of a sequence first."""
        self.groups[group].release(block)

    def may_write(self, group: int, block: int) -> bool:
        """Whether its only holder may write to it; otherwise into a copy."""
        return self.groups[group].count(block) == 1 and not self.groups[group].known(block)

    def publish(
        self, before: Link | None, tokens: Sequence[int], answered: bytes, blocks: Sequence[int | None]
    ) -> Link | None:
        """Say what `blocks` hold, one of each group (None: not there), all held by the caller: entries of `tokens`.

        before: the link of the block before, None at the beginning. answered: see `Link`. Gives the link that later
        blocks go after; it may be of other blocks that hold the same. None where `before` is not to be found any more.
        """
        before = before or self.chains.root
        if before is not self.chains.root and before.before is None:
            return None
        link = self.chains.add(before, tokens, answered, len(blocks))
        for group, block in enumerate(blocks):
            if block is not None and link.blocks[group] is None and not self.groups[group].known(block):
                self.groups[group].learn(block)
                self._links[group][block] = link
                link.blocks[group] = block
        return link

    def lookup(self, tokens: Sequence[int], *, answers: bool = False) -> Found:
        """The longest beginning of `tokens` whose K/V are there, as far as a next token sees them.

        `answers`: also entries that decode steps wrote; without, every bit is as a cold prefill gives it.
        """
        way = self.chains.find(tokens, answers)
        length = sum(entries for _, entries in way)
        while way:
            if all(self._sees(group, way, length) for group in range(len(self.windows))):
                return Found(tuple(link for link, _ in way), length)
            length -= way.pop()[1]
        return Found()

    def _sees(self, group: int, way: Sequence[tuple[Link, int]], length: int) -> bool:
        window = self.windows[group]
        first = 0 if window is None else max(0, length - window + 1) // BLOCK
        return all(link.blocks[group] is not None for link, _ in way[first:])

    def clear(self) -> None:
        """Forget what blocks hold; cached ones are free then."""
        for link in list(self.chains.root.after.values()):
            self._remove(link)

    def give_up(self, group: int, first: int) -> None:
        """Forget what the group's blocks from number `first` on hold."""
        for block in [block for block in self._links[group] if block >= first]:
            if block in self._links[group]:  # it was not forgotten with one before it
                self._forget(group, block)

    def _forget(self, group: int, block: int) -> None:
        """The block's entries are gone; and where every token sees them, so is all that comes after them."""
        link = self._links[group].pop(block)
        link.blocks[group] = None
        self.groups[group].forget(block)
        if self.windows[group] is None:
            self._remove(link)
            return
        while not link.after and not any(block is not None for block in link.blocks):
            before = link.before
            self._remove(link)
            if before is None or before is self.chains.root:
                return
            link = before

    def _remove(self, link: Link) -> None:
        for gone in self.chains.remove(link):
            for group, block in enumerate(gone.blocks):
                if block is not None:
                    del self._links[group][block]
                    self.groups[group].forget(block)
