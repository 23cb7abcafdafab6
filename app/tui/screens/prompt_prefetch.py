"""Prompt prefetch: token counts while the user types, prefill in pauses.

Timers only: `ChatView` gives the function that counts or prefills, and calls `typed` with each change of the prompt.
Other code asks `typing` before it opens a dialog.

Guard: tests/tui/test_typing.py.
"""

import time
from collections.abc import Callable

from textual.screen import Screen
from textual.timer import Timer

_COUNT_S = 0.3  # between token counts while the user types
_PAUSE_S = 0.25  # without a key, until the prompt is prefilled
_HANDS_OFF_S = 1.0  # without a key, until a dialog with letter keys may open


class PromptPrefetch:
    """ask: called with False while the user types, with True in a pause."""

    def __init__(self, screen: Screen[None], ask: Callable[[bool], None]) -> None:
        self._screen = screen
        self._ask = ask
        self._typed = float("-inf")  # time of the last key
        self._pause: Timer | None = None
        self._counting: Timer | None = None

    @property
    def typing(self) -> bool:
        """True shortly after a key."""
        return time.monotonic() < self._typed + _HANDS_OFF_S

    def typed(self) -> None:
        """Note that the prompt's text changed."""
        self._typed = time.monotonic()
        self.wait_for_pause()
        if self._counting is None:
            self._counting = self._screen.set_timer(_COUNT_S, self._count)

    def wait_for_pause(self) -> None:
        """Restart the wait for a pause."""
        if self._pause is not None:
            self._pause.stop()
        self._pause = self._screen.set_timer(_PAUSE_S, self._paused)

    def _paused(self) -> None:
        if self._counting is not None:  # the prefill counts, too
            self._counting.stop()
            self._counting = None
        self._ask(True)

    def _count(self) -> None:
        if self._counting is not None:  # else a pause came first, while this call was queued
            self._counting = None
            self._ask(False)
