"""What a stream's terminal may be sent: asked here by everything that draws outside the chat.

Two questions, since they have two answers: may a line be drawn over, and may text have a style (colour, bold, dim)?
"""

import os
from typing import TextIO


def can_redraw(stream: TextIO) -> bool:
    """Whether progress can be drawn in place: on a terminal that is not TERM=dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def may_style(stream: TextIO) -> bool:
    """Whether text may be styled: where lines can be drawn over, unless NO_COLOR is set."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")
