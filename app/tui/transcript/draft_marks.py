"""Marks of draft tokens in a rendered answer: accepted ones underlined in green, rejected ones struck through.

Rendering leaves out markup and adds bullets and frames, so words of the lines are looked up in the source, in order.
Words that are not found there stay as they are. Rejected draft tokens are no part of the answer: they are inserted
into the lines after the last word before them.

`Entry` calls `sanitised`, then `mark_drafts`, while draft tokens are shown (/guesses); nothing is stored. A wrong place
moves a mark, never text. tests/tui/test_guesses.py guards this.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct
from textual.content import Content

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.output.sanitise import Sanitiser, sanitise
from headrace.app.tui.widgets.lines import ACCEPTED, REJECTED

_WORD = re.compile(r"\w+|[^\w\s]")  # a word, or one sign of punctuation
_NEAR = 200  # characters of markup between two words at most
_WITHIN = 12  # and within one
_LEAD = re.compile(r" *(?:[•◦▪☐☑▎▏┊]|\d+\.)? +")  # of a list, a quotation or code: `  • `, `12. `, `▎ `
_BARS = "▎▏┊"
_PADDING = re.compile(" {2,}")  # of a table's cell


class MarkedPiece(NamedTuple):
    """A word, or a part of one, that a drawn line and the source have in common.

    column: of its first character in the line.
    position: of its first character in the source.
    length: characters.
    """

    column: int
    position: int
    length: int


class DraftMarks(Struct, frozen=True):
    """Draft tokens of a text by their positions in characters, in order. It is False if there are none."""

    accepted: tuple[tuple[int, int], ...] = ()
    """(begin, end)."""
    rejected: tuple[tuple[int, str], ...] = ()
    """(position, text that would have stood there)."""

    @classmethod
    def of(cls, steps: AnswerSteps) -> "DraftMarks":
        return cls(tuple(steps.accepted_spans()), tuple(steps.rejected()))

    def __bool__(self) -> bool:
        return bool(self.accepted or self.rejected)


def sanitised(text: str, marks: DraftMarks) -> tuple[str, DraftMarks]:
    """Return a text as it is drawn, and its marks there."""
    positions = sorted({*chain.from_iterable(marks.accepted), *(position for position, _ in marks.rejected)})
    safe = Sanitiser()
    drawn = ""
    moved = {}  # positions in the drawn text by those in the text
    last = 0
    for position in positions:
        drawn += safe.feed(text[last:position])
        moved[position] = len(drawn)
        last = position
    accepted = tuple((moved[begin], moved[end]) for begin, end in marks.accepted)
    rejected = tuple((moved[position], draft) for position, draft in marks.rejected)
    return drawn + safe.feed(text[last:]), DraftMarks(accepted, rejected)


def mark_drafts(lines: Sequence[Content], source: str, marks: DraftMarks, width: int, start: int = 0) -> list[Content]:
    """Return the lines with their marks.

    lines: the drawn text.
    source: the Markdown that it was made of.
    marks: with positions in `source`.
    width: cells of a line.
    start: position in `source` at which the lines' text begins.
    """
    marked: list[Content] = []
    rejected = [(position, text) for position, text in marks.rejected if position >= start]
    for pieces, line in _located(lines, source, start):
        if not pieces:
            marked.append(line)
            continue
        styled = line
        for left, right in _underlined(pieces, marks.accepted, line.plain):
            styled = styled.stylize(ACCEPTED, left, right)
        last_piece = pieces[-1]
        # Drafts up to the end of this line's text stand in it.
        num_here = bisect_right(rejected, last_piece.position + last_piece.length, key=itemgetter(0))
        if num_here:
            marked += _wrapped(_inserted(styled, pieces, rejected[:num_here]), width)
            del rejected[:num_here]
        else:
            marked.append(styled)
    for _, text in rejected:  # after the last word
        last = marked.pop() if marked else Content("")
        marked += _wrapped(Content.assemble(last, _struck(text)), width)
    return marked


def _located(lines: Sequence[Content], source: str, at: int) -> Iterable[tuple[list[MarkedPiece], Content]]:
    """Yield each line with the places of its words in the source, which is searched from `at` on."""
    for line in lines:
        plain = line.plain
        pieces = list[MarkedPiece]()
        for word in _WORD.finditer(plain):
            index = source.find(word[0], at, at + _NEAR + len(word[0]))
            if index >= 0:
                pieces.append(MarkedPiece(word.start(), index, len(word[0])))
                at = index + len(word[0])
                continue
            for column in range(word.start(), word.end()):  # markup within the word
                index = source.find(plain[column], at, at + _WITHIN)
                if index >= 0:
                    pieces.append(MarkedPiece(column, index, 1))
                    at = index + 1
        yield pieces, line


def _underlined(pieces: Sequence[MarkedPiece], spans: Sequence[tuple[int, int]], plain: str) -> list[tuple[int, int]]:
    """Return (begin, end) in a line of its pieces within the spans; those with spaces between them are one."""
    ranges: list[tuple[int, int]] = []
    for column, position, length in pieces:
        # Spans are in order: the first one that may be in the piece is the first that ends after its beginning.
        for begin, end in spans[bisect_right(spans, position, key=itemgetter(1)) :]:
            if begin >= position + length:
                break
            left = column + max(begin, position) - position
            right = column + min(end, position + length) - position
            if ranges and begin < position:  # the span began in an earlier piece: only spaces may stand between
                last_left, last_right = ranges[-1]
                if not plain[last_right:left].strip():
                    left = last_left
                    ranges.pop()
            ranges.append((left, right))
    return ranges


def _inserted(line: Content, pieces: Sequence[MarkedPiece], rejected: Sequence[tuple[int, str]]) -> Content:
    """Return a line with rejected draft tokens. A table's padding after them shrinks by their width."""
    for at, text in reversed(rejected):
        # The last word that begins before them; the start of the line, if there is none. Words have rising columns.
        before = max((piece for piece in pieces if piece.position < at), default=MarkedPiece(pieces[0].column, at, 0))
        column = before.column + min(before.length, at - before.position)
        struck = _struck(text)
        end = column
        if padding := _PADDING.match(line.plain, column):
            end += min(struck.cell_length, len(padding[0]) - 1)
        line = Content.assemble(line[:column], struck, line[end:])
    return line


def _struck(text: str) -> Content:
    """Return a rejected draft token, struck through, on one line."""
    return Content.styled(sanitise(text).replace("\n", "⏎").replace("\t", " "), REJECTED)


def _wrapped(line: Content, width: int) -> list[Content]:
    """Wrap a line that became too long; the other parts begin as it does."""
    if line.cell_length <= width:
        return [line]
    match = _LEAD.match(line.plain)
    lead = match.end() if match else 0
    head = line[:lead]
    rest = line[lead:]
    room = max(1, width - lead)
    parts = rest.fold(room) if "▏" in head.plain else rest.wrap(room)
    next_head = Content(" " * lead)
    if any(bar in head.plain for bar in _BARS):
        next_head = head
    return [Content.assemble(head, parts[0]), *(Content.assemble(next_head, part) for part in parts[1:])]
