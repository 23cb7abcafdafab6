"""Longest common prefix of two token sequences."""

from collections.abc import Sequence

_CHUNK = 256  # tokens that are compared at once


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shared = min(len(a), len(b))
    start = 0
    while start < shared:
        end = min(start + _CHUNK, shared)
        if list(a[start:end]) != list(b[start:end]):
            return next(at for at in range(start, end) if a[at] != b[at])
        start = end
    return shared
