"""Marks that a growing text may have begun: the part that is held back until more text comes."""


def half_length(text: str, *marks: str) -> int:
    """Return the number of characters at the end of a text that begin a mark without completing it; 0 if none do."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
