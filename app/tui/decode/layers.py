"""Braille drawings of one size laid over each other, each in its style."""

from collections.abc import Sequence
from itertools import groupby

from textual.content import Content

_BLANK = 0x2800


def layered(layers: Sequence[tuple[Sequence[str], str]]) -> list[Content]:
    """The lines of all layers: (rows, style), the front one last.

    Where several have dots in a cell, all of them show, in the front one's style. What is no braille covers the cell.
    """
    lines = []
    for texts in zip(*(rows for rows, _ in layers), strict=True):
        cells = [_cell([(text[at], style) for text, (_, style) in zip(texts, layers, strict=True)])
                 for at in range(len(texts[0]))]  # fmt: skip
        runs = groupby(cells, key=lambda cell: cell[1])
        lines.append(Content.assemble(*(("".join(text for text, _ in run), style) for style, run in runs)))
    return lines


def _cell(stack: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """One cell of all layers, the front one last."""
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
