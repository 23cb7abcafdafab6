"""Underlines of accepted draft tokens in a rendered answer.

Rendering leaves out markup and adds bullets and frames, so words of the lines are looked up in the source, in order.
Words that are not found there stay as they are.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from textual.content import Content

from headrace.app.output.sanitise import Sanitiser

Spans = Sequence[tuple[int, int]]
"""(begin, end) in characters of a text, in order."""

_STYLE = "underline $text-accent"
_WORD = re.compile(r"\w+|[^\w\s]")
_NEAR = 200  # characters of markup between two words at most
_WITHIN = 12  # and within one


def sanitised(text: str, spans: Spans) -> tuple[str, Spans]:
    """Return a text as it is drawn, and its spans there."""
    safe, drawn, moved, at = Sanitiser(), "", [], 0
    for begin, end in spans:
        drawn += safe.feed(text[at:begin])
        start = len(drawn)
        drawn += safe.feed(text[begin:end])
        moved.append((start, len(drawn)))
        at = end
    return drawn + safe.feed(text[at:]), moved


def mark_accepted(lines: Sequence[Content], source: str, spans: Spans, start: int = 0) -> list[Content]:
    """Return the lines with the words within the spans underlined. start: of the lines' text in `source`."""
    marked, at = [], start
    for line in lines:
        plain, pieces = line.plain, []  # (place in the line, place in the source, length)
        for word in _WORD.finditer(plain):
            found = source.find(word[0], at, at + _NEAR + len(word[0]))
            if found >= 0:
                pieces.append((word.start(), found, len(word[0])))
                at = found + len(word[0])
                continue
            for place in range(word.start(), word.end()):  # markup within the word
                if (found := source.find(plain[place], at, at + _WITHIN)) >= 0:
                    pieces.append((place, found, 1))
                    at = found + 1
        for left, right in _underlined(pieces, spans, plain):
            line = line.stylize(_STYLE, left, right)
        marked.append(line)
    return marked


def _underlined(pieces: Sequence[tuple[int, int, int]], spans: Spans, plain: str) -> list[tuple[int, int]]:
    """Return (begin, end) in a line of its pieces within the spans; those with spaces between them are one."""
    ranges: list[tuple[int, int]] = []
    for place, found, length in pieces:
        for begin, end in spans[bisect_right(spans, found, key=itemgetter(1)) :]:
            if begin >= found + length:
                break
            left, right = place + max(begin, found) - found, place + min(end, found + length) - found
            if ranges and begin < found and not plain[ranges[-1][1] : left].strip():
                left = ranges.pop()[0]
            ranges.append((left, right))
    return ranges
