"""Rendering of a model's Markdown as styled lines, for an answer that grows on a terminal.

The chat with --inline writes its answers through `MarkdownOutput`. Only the last blocks can still change as text comes,
so all before them are printed for good.

Guard: tests/app/output/test_rendered_markdown.py.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from headrace.app.output.markdown_parser import image_text, parser
from headrace.app.output.sanitise import Sanitiser
from headrace.app.output.terminal import console

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.segment import Segment

_CODE_THEME = "ansi_dark"  # without a background
_WIDEST = 120  # cells of a line; longer ones are hard to read
_GROWING = 2  # last blocks that later text may change, such as a paragraph that `---` makes a heading
_PAUSE = 4.0  # times a drawing took, until the next one: long code takes long


class RenderedLine(NamedTuple):
    """A line with its styles as escape sequences, and the cells that it takes."""

    text: str
    cells: int


BLANK = RenderedLine("", 0)


class MarkdownOutput:
    """Appends finished blocks, rendered. Below them are the growing ones, drawn again as text comes.

    The cursor stays at the beginning of the line below. It cannot go up beyond the top of the window, so only the last
    lines of taller blocks are drawn while they grow; all are drawn once they are finished.
    """

    def __init__(self, append: Callable[[str], None]) -> None:
        """append: takes text and escape sequences for the terminal."""
        self._append = append
        self._sanitiser = Sanitiser()
        self._source = ""  # of the growing blocks, drawn or not
        self._drawn: list[RenderedLine] = []  # lines of them on the screen
        self._has_finished = False  # blocks stand above
        self._draws_at = 0.0  # earliest time of the next drawing

    def write(self, text: str) -> None:
        """Add text of a model. It is drawn at once, or by a later call of `write` or `end`."""
        self._source += self._sanitiser.feed(text)
        begin = time.perf_counter()
        if begin < self._draws_at:
            return
        blocks = blocks_of(self._source)
        finished = self._rendered("".join(blocks[:-_GROWING]))
        if finished:
            self._source = "".join(blocks[-_GROWING:])
        # Between the two renderings, each of which puts a blank line first if blocks stand above.
        self._has_finished = self._has_finished or bool(finished)
        height = shutil.get_terminal_size().lines
        # Below the growing lines is that of the cursor; one more is to spare.
        self._draw(finished, self._rendered(self._source)[-max(1, height - 2) :])
        end = time.perf_counter()
        self._draws_at = end + _PAUSE * (end - begin)

    def end(self) -> None:
        """Finish all blocks; other output may follow, and another text."""
        self._draw(self._rendered(self._source), [])
        self._sanitiser = Sanitiser()
        self._source = ""
        self._has_finished = False
        self._draws_at = 0.0

    def _rendered(self, source: str) -> list[RenderedLine]:
        """Return the lines of blocks, after a blank line if others stand above."""
        columns = shutil.get_terminal_size().columns
        lines = rendered_lines(source, max(1, min(columns - 1, _WIDEST)))
        if lines and self._has_finished:
            lines.insert(0, BLANK)
        return lines

    def _draw(self, finished: list[RenderedLine], growing: list[RenderedLine]) -> None:
        """Replace the growing lines on the screen by finished ones, and draw the growing ones of now."""
        columns = shutil.get_terminal_size().columns
        rows = sum(max(1, ceil(line.cells / columns)) for line in self._drawn)  # a narrowed window has wrapped them
        erased = ""
        if rows:
            erased = f"\x1b[{rows}A\r\x1b[J"
        self._append(erased + "".join(f"{line.text}\n" for line in [*finished, *growing]))
        self._drawn = growing


def rendered_lines(source: str, width: int) -> list[RenderedLine]:
    """Return sanitised Markdown as lines of at most `width` cells, with a blank line between blocks.

    Lines have no trailing spaces. They are plain if the terminal shows no styles.
    """
    lines: list[RenderedLine] = []
    for block in blocks_of(source):
        drawn = _block_lines(block, width)
        if lines and drawn:
            lines.append(BLANK)
        lines += drawn
    return lines


def blocks_of(source: str) -> list[str]:
    """Return the sources of the top-level blocks of sanitised Markdown, each up to the next one's beginning."""
    tokens = parser().parse(source)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
    lines = source.splitlines(keepends=True)  # sanitised text has no line break but \n, which the parser counts
    if not starts:
        return []
    cuts = [0, *starts[1:], len(lines)]  # lines before the first block belong to it
    return ["".join(lines[start:end]) for start, end in pairwise(cuts)]


def _block_lines(source: str, width: int) -> list[RenderedLine]:
    """Return the lines of one block without blank ones around it."""
    from rich.markdown import Markdown
    from rich.segment import Segment, Segments

    markdown = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    markdown.parsed = _as_text(parser().parse(source))
    made = console()
    lines = []
    for line in made.render_lines(markdown, made.options.update(width=width), pad=False):
        stripped = _without_end(line)
        with made.capture() as captured:
            made.print(Segments(stripped), end="", soft_wrap=True)
        lines.append(RenderedLine(captured.get(), Segment.get_line_length(stripped)))
    filled = [index for index, line in enumerate(lines) if line.cells]
    if not filled:
        return []
    return lines[filled[0] : filled[-1] + 1]


def _as_text(tokens: list["Token"]) -> list["Token"]:
    """Change the tokens in place, and return them: line breaks stay, images become text with their address."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
            elif child.type == "image":
                child.content = image_text(child)
                child.type = "text"
                child.tag = ""
                child.children = None
    return tokens


def _without_end(line: Sequence["Segment"]) -> list["Segment"]:
    """Drop spaces at the end of a line: a copy has none, and a narrower terminal does not wrap them."""
    cells = list(line)
    while cells and not cells[-1].text.rstrip():
        cells.pop()
    if cells:
        cells[-1] = cells[-1]._replace(text=cells[-1].text.rstrip())
    return cells
