"""Markdown of a model as styled lines for a terminal that appends text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from headrace.app.output.markdown_parser import image_text, parser
from headrace.app.output.terminal import console

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.segment import Segment

_CODE_THEME = "ansi_dark"  # without a background


class RenderedLine(NamedTuple):
    """A line with its styles as escape sequences, and the cells that it takes."""

    text: str
    cells: int


BLANK = RenderedLine("", 0)


def rendered_lines(source: str, width: int) -> list[RenderedLine]:
    """Return Markdown as lines of at most `width` cells, without trailing spaces; styled where the terminal may be.

    A blank line stands between blocks.
    """
    lines: list[RenderedLine] = []
    for block in blocks_of(source):
        drawn = _block_lines(block, width)
        lines += [BLANK, *drawn] if lines and drawn else drawn
    return lines


def blocks_of(source: str) -> list[str]:
    """Return the sources of the blocks of Markdown at the top level, each up to the begin of the next."""
    tokens = parser().parse(source)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
    lines = source.splitlines(keepends=True)
    if not starts:
        return []
    cuts = [0, *starts[1:], len(lines)]
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
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _as_text(tokens: list["Token"]) -> list["Token"]:
    """Keep line breaks, and show images as text with their address."""
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
