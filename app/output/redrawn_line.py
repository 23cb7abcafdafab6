"""A line on standard error that is redrawn in place, on a terminal alone."""

import sys

from headrace.app.output.terminal import can_redraw, table_width


class RedrawnLine:
    """draws: False where nothing is drawn."""

    def __init__(self, *, quiet: bool) -> None:
        self.draws = can_redraw(sys.stderr) and not quiet
        self._width = 0

    def draw(self, text: str) -> None:
        """Draw `text` over the line before."""
        if self.draws:
            text = text[: (table_width(sys.stderr) or 80) - 1]  # some terminals wrap in the last column
            sys.stderr.write(f"\r{text:<{self._width}}")
            sys.stderr.flush()
            self._width = len(text)

    def clear(self) -> None:
        """Erase the line."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0
