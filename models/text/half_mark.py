"""Marks that a growing text may have begun: the part that is held back until more text comes."""


def half_length(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that begin a mark without completing it; 0 if none do."""
    return next((length for length in range(len(mark) - 1, 0, -1) if text.endswith(mark[:length])), 0)
