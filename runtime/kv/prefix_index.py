"""Prefix index: a tree of cached blocks, found by their tokens and all tokens before.

Entries are identified by token and by phase (`runtime.ops.Phase`), since kernels compute other bits in prefill than in
decode. A lookup for exact prefill entries therefore ends at the first entry of an answer.

Every node has a key: a digest of the key before it, its tokens and phases. The root's key identifies weights, format
and kernels. Keys name blocks on disk; in memory they lead to a node, and its tokens are compared.

A plain tree without reference counts: `BlockPool` (`runtime.kv.pool`) decides which nodes stay, and calls `add` and
`remove`. Another digest makes stored blocks unreadable; then `_MAGIC` of `runtime.kv.disk` changes, too.

Guard: tests/runtime/kv/test_prefix_index.py.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack

import mlx.core as mx
from msgspec import Struct, field

from headrace.runtime.ops import BLOCK


class PrefixNode(Struct, eq=False):
    """A cached block: up to BLOCK entries after those of `parent`.

    key: its digest, see above.
    tokens: of its entries.
    decode_written: of each entry, 1 for a decode step, 0 for prefill.
    prefill_exact: its first entries that equal a cold prefill of all tokens.
    blocks: the block of each layer group, None if evicted there.
    states: recurrent state after its last entry, if kept.
    parent: None for the root and for removed nodes.
    children: by key.
    children_by_token: by their first token.
    """

    key: bytes
    parent: "PrefixNode | None"
    tokens: tuple[int, ...]
    decode_written: bytes
    prefill_exact: int
    blocks: list[int | None]
    states: list[mx.array] | None = None
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)
    children_by_token: dict[int, list["PrefixNode"]] = field(default_factory=dict)

    def common(self, tokens: Sequence[int], answers: bool) -> int:
        """Return how many entries match `tokens`. answers: all may, else only those that equal a cold prefill."""
        max_entries = len(self.tokens) if answers else self.prefill_exact
        end = min(len(tokens), max_entries)
        return next((index for index in range(end) if self.tokens[index] != tokens[index]), end)


PrefixPath = list[tuple[PrefixNode, int]]
"""Successive nodes from the root on, and how many entries of each match. Only the last may match in part."""


def matching_entries(path: PrefixPath) -> int:
    """Return the length of the prefix that a path has."""
    return sum(entries for _, entries in path)


class PrefixIndex:
    """The tree of all nodes. `key`: identity of the K/V."""

    def __init__(self, key: bytes) -> None:
        self.root = PrefixNode(blake2b(key, digest_size=16).digest(), None, (), b"", 0, [])

    def find(self, tokens: Sequence[int], answers: bool) -> PrefixPath:
        """Return the longest path along `tokens`. answers: see `PrefixNode.common`."""
        end = self.root  # the last node of the longest path so far
        length = 0  # its matching entries
        best = (0, 0)  # entries of that path; at equal length, the node with more exact entries is better
        # Several nodes may have the same tokens, written by prefill or by decode steps: all paths are followed at once.
        level = [self.root]  # nodes whose paths match whole, at one depth
        done = 0  # entries of these paths
        while level and done < len(tokens):
            rest = tokens[done : done + BLOCK]
            candidates = [child for node in level for child in node.children_by_token.get(rest[0], ())]
            level = []
            for node in candidates:
                common = node.common(rest, answers)
                if (done + common, node.prefill_exact) > best:
                    end = node
                    length = common
                    best = (done + common, node.prefill_exact)
                if common == BLOCK:
                    level.append(node)
            done += BLOCK
        path = []
        while end.parent is not None:
            path.append((end, length))
            end = end.parent
            length = BLOCK
        return path[::-1]

    def shared_blocks(self, tokens: Sequence[int]) -> int:
        """Return the number of cached blocks from the root to the last that a different block follows.

        0 if there is none, or if different blocks follow the root alone.
        """
        path = [self.root, *(node for node, length in self.find(tokens, answers=True) if length == BLOCK)]
        for depth in range(len(path) - 1, 0, -1):
            block_tokens = tuple(tokens[depth * BLOCK : (depth + 1) * BLOCK])
            children = path[depth].children.values()
            if any(child.tokens[: len(block_tokens)] != block_tokens[: len(child.tokens)] for child in children):
                return depth
        return 0

    def add(self, parent: PrefixNode, tokens: Sequence[int], decode_written: bytes, groups: int) -> PrefixNode:
        """Return the node of these entries after `parent`, new or not.

        groups: layer groups of the pool; a new node has no block in any of them. Raises ValueError after a partial
        block, and for entries that are no block.
        """
        if parent is not self.root and len(parent.tokens) < BLOCK:
            raise ValueError("a partial block is the last of its path")
        if not 1 <= len(tokens) <= BLOCK or len(decode_written) != len(tokens):
            raise ValueError(
                f"a block has 1 to {BLOCK} entries, each with its phase, not {len(tokens)}, {len(decode_written)}"
            )
        key = digest(parent.key, tokens, decode_written)
        child = parent.children.get(key)
        if child is not None:
            if child.tokens != tuple(tokens) or child.decode_written != decode_written:
                raise ValueError("two blocks of different tokens have one key")
            return child
        prefill_exact = 0
        if parent.prefill_exact == len(parent.tokens):  # the root's are both 0
            prefill_exact = (decode_written + b"\1").index(1)  # all, if no decode step wrote any
        node = PrefixNode(key, parent, tuple(tokens), decode_written, prefill_exact, [None] * groups)
        parent.children[key] = node
        parent.children_by_token.setdefault(tokens[0], []).append(node)
        return node

    def remove(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """Remove a node and all nodes after it, and yield each. Nothing is removed before it is iterated."""
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.key]
        siblings = node.parent.children_by_token[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children_by_token[node.tokens[0]]
        node.parent = None
        pending = [node]
        while pending:
            removed = pending.pop()
            for child in removed.children.values():
                child.parent = None
                pending.append(child)
            removed.children = {}
            removed.children_by_token = {}
            yield removed


def digest(parent: bytes, tokens: Sequence[int], decode_written: bytes) -> bytes:
    """Return the key of a block of `tokens` after the block of key `parent`."""
    return blake2b(pack(f"<{len(tokens)}q", *tokens) + decode_written, key=parent, digest_size=16).digest()
