"""Text search in the rows of the transcript.

A pure function of the drawn lines: `Transcript.find` calls it with every key of the find bar, and marks the spans.

Guard: tests/tui/transcript/test_find.py.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from msgspec import Struct


class Find(Struct, frozen=True):
    """One match."""

    number: int  # among all, from 1
    count: int  # of all
    spans: dict[int, tuple[int, int]]  # (begin, end) in characters by row, first row first

    @property
    def begins(self) -> tuple[int, int]:
        """Row and character of the start."""
        row, (start, _) = next(iter(self.spans.items()))
        return row, start


def seek(rows: Sequence[str], words: str, last: tuple[int, int] | None, by: int) -> Find | None:
    """Find `words`, ignoring case and line breaks between them; None if there is no match.

    rows: lines of text; a match may go from one to the next.
    words: with any space between them.
    last: start of the previous match; None: return the last match.
    by: -1 the match above it, 1 below, cyclically.
    """
    wanted = words.split()
    if not wanted:
        return None
    starts = []
    length = 0
    for row in rows:
        starts.append(length)
        length += len(row) + 1
    text = "\n".join(rows)
    pattern = re.compile(r"\s+".join(re.escape(word) for word in wanted), re.IGNORECASE)
    matches = [match.span() for match in pattern.finditer(text)]
    if not matches:
        return None
    number = len(matches) - 1
    if last is not None:
        last_row, character = last
        if last_row < len(rows):  # else the text became shorter
            begins = [start for start, _ in matches]
            position = starts[last_row] + character
            number = bisect_left(begins, position) - 1 if by < 0 else bisect_right(begins, position)
            number %= len(matches)
    # Positions in the whole text, as characters of each row that the match is in.
    start, end = matches[number]
    spans: dict[int, tuple[int, int]] = {}
    for index in range(bisect_right(starts, start) - 1, bisect_right(starts, end - 1)):
        begin = max(start - starts[index], 0)
        stop = min(end - starts[index], len(rows[index]))
        if begin < stop:
            spans[index] = begin, stop
    return Find(number + 1, len(matches), spans)
