"""Search for `--stop` strings in streamed text.

Only text that may be the start of a stop string is held back: at most one character less than the longest one. The
earliest occurrence ends the text and is left out.
"""

from collections.abc import Iterable

from headrace.runtime.errors import UsageError


class StopMatcher:
    """Matcher for one stream. Time per piece: its length times the length of the stop strings."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises UsageError for an empty stop string, which would match anywhere."""
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise UsageError("a stop string cannot be empty")
        self._longest_tail = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text before any possible stop string, and whether one was found."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        held_from = self._first_possible_start(text)
        if starts and min(starts) <= held_from:
            self._held, self._stopped = "", True
            return text[: min(starts)], True
        self._held = text[held_from:]
        return text[:held_from], False

    def flush(self) -> tuple[str, bool]:
        """End the stream; return as `feed` does the text held back."""
        held, self._held = self._held, ""
        starts = [start for stop in self._stops if (start := held.find(stop)) >= 0]
        self._stopped = self._stopped or bool(starts)
        return held[: min(starts, default=len(held))], self._stopped

    def _first_possible_start(self, text: str) -> int:
        """Return the start of the longest tail that is a prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest_tail), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
