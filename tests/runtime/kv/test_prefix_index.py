"""Blocks of a prefix index that several sequences begin with."""

from headrace.runtime.kv.prefix_index import PrefixIndex
from headrace.runtime.ops import BLOCK


def add(index: PrefixIndex, tokens: list[int], phase: bytes = b"\0") -> None:
    """Cache all blocks of a sequence, the last one in part."""
    node = index.root
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        node = index.add(node, block, phase * len(block), 1)


def test_a_prefix_shared_by_two_sequences_is_counted_up_to_their_fork() -> None:
    index = PrefixIndex(b"")
    first = list(range(3 * BLOCK + 10))
    assert index.shared_blocks(first) == 0
    add(index, first)
    assert index.shared_blocks(first) == 0, "its own blocks"
    add(index, first[: 2 * BLOCK + 5])
    assert index.shared_blocks(first) == 0, "an earlier turn of the same sequence"
    add(index, first, b"\1")
    assert index.shared_blocks(first) == 0, "the same tokens of decode steps"
    other = [*first[: 2 * BLOCK + 5], *[1] * BLOCK]
    add(index, other)
    assert index.shared_blocks(first) == index.shared_blocks(other) == 2
    assert index.shared_blocks([*first[:BLOCK], 7, 7]) == 1
    assert index.shared_blocks([9, *first]) == 0
