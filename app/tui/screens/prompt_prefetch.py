"""When the engine is asked to count, and when to read, what is being typed: nobody waits for an answer then."""

import time
from collections.abc import Callable

from textual.screen import Screen
from textual.timer import Timer

_COUNT_S = 0.3  # between two counts of its tokens while keys come
_PAUSE_S = 0.25  # without a key, after which what stands in the input is worth reading
_HANDS_OFF_S = 1.0  # without a key, after which a question with answers by letter may come up


class PromptPrefetch:
    """ask: called while keys come with `pause` False, and with True once none came for a while."""

    def __init__(self, screen: Screen[None], ask: Callable[[bool], None]) -> None:
        self._screen, self._ask = screen, ask
        self._typed = float("-inf")  # when, last
        self._pause: Timer | None = None
        self._counting: Timer | None = None

    @property
    def typing(self) -> bool:
        """Whether someone typed only just now."""
        return time.monotonic() < self._typed + _HANDS_OFF_S

    def typed(self) -> None:
        """The text in the input is another one."""
        self._typed = time.monotonic()
        self.wait_for_pause()
        if self._counting is None:
            self._counting = self._screen.set_timer(_COUNT_S, self._count)

    def wait_for_pause(self) -> None:
        """Ask when nothing happened for a while, from now."""
        if self._pause is not None:
            self._pause.stop()
        self._pause = self._screen.set_timer(_PAUSE_S, self._paused)

    def _paused(self) -> None:
        if self._counting is not None:  # what is read is counted, too
            self._counting.stop()
            self._counting = None
        self._ask(True)

    def _count(self) -> None:
        self._counting = None
        self._ask(False)
