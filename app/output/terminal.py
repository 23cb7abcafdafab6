"""Capabilities of a stream's terminal: redrawing, styles, width.

Commands ask here alone: TERM=dumb means no redrawing, NO_COLOR no styles, a pipe neither, and no width.

Guard: tests/app/output/test_terminal.py.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TextIO

from headrace.app.output.sanitise import sanitise

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def can_redraw(stream: TextIO) -> bool:
    """Return whether lines can be drawn over: on a terminal that is not TERM=dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def on_terminal() -> bool:
    """Return whether standard input, output and error are all a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def has_screen() -> bool:
    """Return whether a program can take the whole screen: on a terminal that is neither unnamed nor TERM=dumb."""
    return on_terminal() and os.environ.get("TERM", "") not in ("", "dumb")


def may_style(stream: TextIO) -> bool:
    """Return whether text may be styled: where lines can be drawn over, unless NO_COLOR is set."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console that sanitises text, reads no markup and styles only where allowed."""
    from rich.console import Console

    class Sanitised(Console):
        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=sanitise(segment.text))

    colours: Literal["auto"] | None = None
    if may_style(sys.stderr if stderr else sys.stdout):
        colours = "auto"
    return Sanitised(stderr=stderr, highlight=False, markup=False, color_system=colours)


def table_width(stream: TextIO) -> int | None:
    """Return the terminal's columns; None in pipes and files."""
    if not stream.isatty():
        return None
    return shutil.get_terminal_size().columns
