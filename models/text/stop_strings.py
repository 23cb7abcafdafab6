"""Search for `--stop` strings and other marks in streamed text.

Only text that may be the start of a mark is held back: at most one character less than the longest one. The earliest
occurrence of a stop string ends the text and is left out.

Guards: tests/models/text/test_stop_strings.py.
"""

from collections.abc import Iterable

from headrace.runtime.errors import UsageError


class StopMatcher:
    """Matcher for one stream.

    Time per piece: its length times that of the stop strings, and the square of the longest one.

    matched: the stop string that ended the text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises UsageError for an empty stop string, which would match anywhere."""
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise UsageError("a stop string cannot be empty")
        self._pending = ""  # text that is held back
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text before any possible stop string, and whether one was found."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._pending + text
        start, stop = self._first(text)
        certain = len(text) - half_length(text, *self._stops)
        # A stop string that begins after `certain` waits: one that begins at `certain` may still become complete.
        if stop is not None and start <= certain:
            self._pending = ""
            self.matched = stop
            return text[:start], True
        self._pending = text[certain:]
        return text[:certain], False

    def flush(self) -> tuple[str, bool]:
        """End the stream; return as `feed` does the text held back."""
        pending = self._pending
        self._pending = ""
        start, stop = self._first(pending)
        self.matched = stop or self.matched
        return pending[:start], self.matched is not None

    def _first(self, text: str) -> tuple[int, str | None]:
        """Return the earliest stop string and its place; the text's length and None without one."""
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches, default=(len(text), None), key=lambda pair: pair[0])


def half_length(text: str, *marks: str) -> int:
    """Return the number of characters at the end of a text that begin a mark without completing it; 0 if none do."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
