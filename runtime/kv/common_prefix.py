"""Longest common prefix of two token sequences.

For prompts of up to 100,000 tokens: slices are compared at once, and single tokens only in the first that differ.

Guard: tests/runtime/kv/test_prefix.py.
"""

from collections.abc import Sequence

_CHUNK = 256  # tokens that are compared at once


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shared = min(len(a), len(b))
    start = 0
    while start < shared:
        end = min(start + _CHUNK, shared)
        if list(a[start:end]) != list(b[start:end]):  # tuples and lists differ even with equal tokens
            return next(index for index in range(start, end) if a[index] != b[index])
        start = end
    return shared
