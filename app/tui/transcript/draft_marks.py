"""Marks of draft tokens in a rendered answer: accepted ones underlined in green, rejected ones struck through.

Rendering leaves out markup and adds bullets and frames, so words of the lines are looked up in the source, in order.
Words that are not found there stay as they are. Rejected draft tokens are no part of the answer: they are inserted
into the lines behind the last word before them.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from textual.content import Content

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.output.sanitise import Sanitiser, sanitise

ACCEPTED = "underline $text-success"
REJECTED = "strike $text-error"
_WORD = re.compile(r"\w+|[^\w\s]")
_NEAR = 200  # characters of markup between two words at most
_WITHIN = 12  # and within one
_LEAD = re.compile(r" *(?:[•◦▪☐☑▎▏┊]|\d+\.)? +")  # of a line in a list, a quotation or a code block
_BARS = "▎▏┊"
_PADDING = re.compile(" {2,}")  # of a table's cell

Piece = tuple[int, int, int]
"""Place in a line, place in the source, length."""


@dataclass(frozen=True, slots=True)
class DraftMarks:
    """accepted: (begin, end) in characters of a text, in order. rejected: (place, text), in order. False if empty."""

    accepted: tuple[tuple[int, int], ...] = ()
    rejected: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, steps: AnswerSteps) -> "DraftMarks":
        return cls(tuple(steps.accepted_spans()), tuple(steps.rejected()))

    def __bool__(self) -> bool:
        return bool(self.accepted or self.rejected)


def sanitised(text: str, marks: DraftMarks) -> tuple[str, DraftMarks]:
    """Return a text as it is drawn, and its marks there."""
    places = sorted({*chain.from_iterable(marks.accepted), *(position for position, _ in marks.rejected)})
    safe = Sanitiser()
    drawn = ""
    moved = {}
    at = 0
    for position in places:
        drawn += safe.feed(text[at:position])
        moved[position], at = len(drawn), position
    accepted = tuple((moved[begin], moved[end]) for begin, end in marks.accepted)
    return drawn + safe.feed(text[at:]), DraftMarks(accepted, tuple((moved[at], text) for at, text in marks.rejected))


def mark_drafts(lines: Sequence[Content], source: str, marks: DraftMarks, width: int, start: int = 0) -> list[Content]:
    """Return the lines, of at most `width` cells, with their marks. start: of the lines' text in `source`."""
    marked: list[Content] = []
    rejected = [(position, text) for position, text in marks.rejected if position >= start]
    at = start
    for pieces, line in _located(lines, source, start):
        styled = line
        for left, right in _underlined(pieces, marks.accepted, line.plain):
            styled = styled.stylize(ACCEPTED, left, right)
        at = max([at, *(begin + length for _, begin, length in pieces[-1:])])
        here = [] if not pieces else rejected[: bisect_right(rejected, at, key=itemgetter(0))]
        del rejected[: len(here)]
        marked += _wrapped(_inserted(styled, pieces, here), width) if here else [styled]
    for _, text in rejected:  # behind the last word
        last = marked.pop() if marked else Content("")
        marked += _wrapped(Content.assemble(last, _struck(text)), width)
    return marked


def _located(lines: Sequence[Content], source: str, at: int) -> Iterable[tuple[list[Piece], Content]]:
    """Yield each line with the places of its words in the source, which is searched from `at` on."""
    for line in lines:
        plain = line.plain
        pieces = list[Piece]()
        for word in _WORD.finditer(plain):
            index = source.find(word[0], at, at + _NEAR + len(word[0]))
            if index >= 0:
                pieces.append((word.start(), index, len(word[0])))
                at = index + len(word[0])
                continue
            for position in range(word.start(), word.end()):  # markup within the word
                if (index := source.find(plain[position], at, at + _WITHIN)) >= 0:
                    pieces.append((position, index, 1))
                    at = index + 1
        yield pieces, line


def _underlined(pieces: Sequence[Piece], spans: Sequence[tuple[int, int]], plain: str) -> list[tuple[int, int]]:
    """Return (begin, end) in a line of its pieces within the spans; those with spaces between them are one."""
    ranges: list[tuple[int, int]] = []
    for position, at, length in pieces:
        for begin, end in spans[bisect_right(spans, at, key=itemgetter(1)) :]:
            if begin >= at + length:
                break
            left = position + max(begin, at) - at
            right = position + min(end, at + length) - at
            if ranges and begin < at and not plain[ranges[-1][1] : left].strip():
                left = ranges.pop()[0]
            ranges.append((left, right))
    return ranges


def _inserted(line: Content, pieces: Sequence[Piece], rejected: Sequence[tuple[int, str]]) -> Content:
    """Return a line with rejected draft tokens. A table's padding behind them shrinks by their width."""
    for at, text in reversed(rejected):
        position, begin, length = max((piece for piece in pieces if piece[1] < at), default=(pieces[0][0], at, 0))
        here = position + min(length, at - begin)
        struck = _struck(text)
        padding = _PADDING.match(line.plain, here)
        spare = min(struck.cell_length, len(padding[0]) - 1) if padding else 0
        line = Content.assemble(line[:here], struck, line[here + spare :])
    return line


def _struck(text: str) -> Content:
    return Content.styled(sanitise(text).replace("\n", "⏎").replace("\t", " "), REJECTED)


def _wrapped(line: Content, width: int) -> list[Content]:
    """Wrap a line that became too long; the other parts begin as it does."""
    if line.cell_length <= width:
        return [line]
    lead = len(match[0]) if (match := _LEAD.match(line.plain)) else 0
    head = line[:lead]
    rest = line[lead:]
    room = max(1, width - lead)
    parts = rest.fold(room) if "▏" in head.plain else rest.wrap(room)
    others = head if any(bar in head.plain for bar in _BARS) else Content(" " * lead)
    return [Content.assemble(others if n else head, part) for n, part in enumerate(parts)]
