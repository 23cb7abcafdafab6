"""Prefix reuse of one sequence: lookup in a block pool, and registration of its own full blocks.

Contract: `load_prefix` starts an empty cache with the longest cached prefix of some tokens. Between a commit and the
next pass, `cache_blocks` makes committed entries available to other sequences. Subclasses move the entries.

`BlockTable` shares whole blocks with the pool; `SlotCache` copies from and to them. Both implement `_load`,
`_cache_block` and `_shorten`; the lengths, phases and nodes here stay the same for both.

Guards: tests/runtime/kv/test_block_table.py and test_slot_cache.py.
"""

from abc import abstractmethod
from collections.abc import Sequence

from headrace.runtime.kv.cache import KVCache
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.prefix_index import PrefixNode, PrefixPath
from headrace.runtime.ops import BLOCK, Phase


class ReusableCache(KVCache):
    """One sequence's lengths, and the nodes of its entries in the prefix index. pool: None without prefix sharing."""

    def __init__(self, pool: BlockPool | None, limit: int) -> None:
        super().__init__(limit)
        self.phase: Phase = "prefill"  # of the pass in flight
        self._pool = pool
        self._nodes: list[PrefixNode] = []  # of each full block that was cached, from the first on
        self._decode_written = bytearray()  # of each entry: 1 if a decode step wrote it, 0 for prefill

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self._decode_written += (b"\1" if self.phase == "decode" else b"\0") * tokens

    def rollback(self) -> None:
        pending = self.length > self.committed
        super().rollback()
        self._shorten(pending)

    def trim(self, length: int) -> None:
        """Keep the first `length` committed entries. Raises ValueError if they are not `reachable`."""
        if 0 < length <= self.committed and not self.reachable(length):
            raise ValueError(f"the cache has dropped what it would need to go back to {length} entries")
        pending = self.length > self.committed
        super().trim(length)
        self._shorten(pending)

    def load_prefix(self, tokens: Sequence[int], *, answers: bool = False) -> int:
        """Start with the pool's longest prefix of `tokens`, committed, and return its length.

        answers: see `BlockPool.lookup`.
        """
        if self.length or self.committed:
            raise ValueError("only an empty cache can load a prefix")
        if self._pool is None:
            return 0
        path = self._pool.lookup(tokens, answers=answers)
        try:
            length = self._load(path)
        except BaseException:  # Ctrl-C, too: blocks that it has taken so far go back
            self.close()
            raise
        self._nodes = [node for node, _ in path[: length // BLOCK]]  # of full blocks
        self._decode_written += b"".join(node.decode_written for node, _ in path)[:length]
        self.length = self.committed = length
        return length

    def cache_blocks(self, tokens: Sequence[int], *, end: bool = False) -> PrefixNode | None:
        """Make the full blocks of committed entries, of the first of `tokens`, available to lookups.

        end: the partial last block, too; the next entry is appended to a copy. Returns the node that ends with the last
        committed entry, if any.
        """
        self._drop_evicted()
        node = None
        if self._nodes and len(self._nodes) * BLOCK == self.committed:
            node = self._nodes[-1]
        for index in range(len(self._nodes), self._num_blocks(end)):
            entries = slice(index * BLOCK, min((index + 1) * BLOCK, self.committed))
            node = self._cache_block(entries, tokens[entries], bytes(self._decode_written[entries]))
            if node is None:
                return None
            if entries.stop - entries.start == BLOCK:
                self._nodes.append(node)
        if not end and self.committed % BLOCK:
            return None
        return node

    def _drop_evicted(self) -> None:
        """Drop nodes that were evicted meanwhile, and all after them: their entries are made available anew."""
        evicted = (index for index, node in enumerate(self._nodes) if node.parent is None)
        del self._nodes[next(evicted, len(self._nodes)) :]

    def _num_blocks(self, with_partial: bool) -> int:
        """Return the number of blocks of committed entries, full ones only or with a partial last one."""
        if with_partial:
            return -(-self.committed // BLOCK)  # rounded up
        return self.committed // BLOCK

    def _parent(self, pool: BlockPool) -> PrefixNode:
        """Return the node of the last full block that was cached; the root before the first."""
        if not self._nodes:
            return pool.index.root
        return self._nodes[-1]

    @abstractmethod
    def _load(self, path: PrefixPath) -> int:
        """Share or copy the blocks of a path; return how many entries the cache then has."""

    @abstractmethod
    def _cache_block(self, entries: slice, tokens: Sequence[int], decode_written: bytes) -> PrefixNode | None:
        """Cache one block after the last of `_nodes`; None if the block before it was evicted."""

    def _shorten(self, pending: bool) -> None:  # noqa: ARG002
        """Drop what belongs to entries past `length`; pending: a pass in flight may still append some."""
        del self._decode_written[self.length :]
        del self._nodes[self.length // BLOCK :]
