"""What a stream's terminal may be sent: asked here by everything that draws outside the chat.

Two questions, since they have two answers: may a line be drawn over, and may text have a style (colour, bold, dim)?
"""

import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def can_redraw(stream: TextIO) -> bool:
    """Whether progress can be drawn in place: on a terminal that is not TERM=dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def may_style(stream: TextIO) -> bool:
    """Whether text may be styled: where lines can be drawn over, unless NO_COLOR is set."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def console(*, stderr: bool = False) -> "Console":
    """A rich console that styles only where that is allowed and lets no text be read as markup."""
    from rich.console import Console

    styled = may_style(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False, markup=False, color_system="auto" if styled else None)


def table_width(stream: TextIO) -> int | None:
    """The columns a table may take: those of the terminal; None where nobody looks and nothing need leave."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
