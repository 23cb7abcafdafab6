"""Text of an answer, sanitised and appended to a stream as it comes: for pipes, dumb terminals and screen readers.

`headrace run` and the line chat print through it. `rendered_markdown.MarkdownOutput` has the same two methods and draws
lines again.

Guard: tests/app/output/test_plain_output.py.
"""

import sys
from collections.abc import Callable

from headrace.app.output.sanitise import Sanitiser


def append_to_stdout(text: str) -> None:
    """Append text to standard output, and show it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class PlainOutput:
    """Appends text as it comes, and moves no cursor."""

    def __init__(self, append: Callable[[str], None] = append_to_stdout) -> None:
        """append: takes text for the terminal."""
        self._append = append
        self._sanitiser = Sanitiser()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Add text of a model."""
        safe = self._sanitiser.feed(text)
        if safe:  # the second half of CR LF gives nothing: the line has ended before
            self._at_line_start = safe.endswith("\n")
            self._append(safe)

    def end(self) -> None:
        """End the line; other output may follow, and another text."""
        if not self._at_line_start:
            self._append("\n")
        self._at_line_start = True
        self._sanitiser = Sanitiser()
