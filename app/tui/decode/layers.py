"""Braille drawings of one size laid over each other, each in its style."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from textual.content import Content

_BLANK = 0x2800


def layered(layers: Sequence[tuple[Sequence[str], str]]) -> list[Content]:
    """Draw layers, (rows, style) each with the front one last, over each other.

    Braille cells combine their dots in the front layer's style. Any other character covers the cell.
    """
    return [_line(texts, [style for _, style in layers]) for texts in zip(*(rows for rows, _ in layers), strict=True)]


def _line(texts: Sequence[str], styles: Sequence[str]) -> Content:
    drawn = [(text, style) for text, style in zip(texts, styles, strict=True) if not text.isspace()]
    if len(drawn) < 2:  # nearly always
        return Content.styled(*drawn[0]) if drawn else Content(texts[0])
    cells = [_cell([(text[at], style) for text, style in drawn]) for at in range(len(texts[0]))]
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))


def _cell(stack: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Combine one cell of all layers."""
    shown = [(text, style) for text, style in stack if text != " "]
    if not shown:
        return " ", ""
    text, style = shown[-1]
    if not _BLANK <= ord(text) < _BLANK + 256:
        return text, style
    dots = 0
    for other, _ in shown:
        dots |= ord(other) - _BLANK if _BLANK <= ord(other) < _BLANK + 256 else 0
    return chr(_BLANK + dots), style
