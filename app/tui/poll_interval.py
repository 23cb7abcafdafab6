"""Intervals of the polling loop: text ten times a second, fewer while nothing is asked, metrics once or twice.

Without a spare core, work of the chat's process delays a kernel thread, and the others wait for it. Then expensive
layouts (a long table) become rarer, so that they take a fixed share of a core, and metrics are drawn half as often.
"""

import time

SHORTEST_S = 0.095  # between polls; longer than the engine's interval, so that each finds text
AWAITING_S = 0.05  # before an answer's first token
_IDLE = 1.6  # times SHORTEST_S: between polls while nothing is asked
_LONGEST_S = 0.38  # on a slow machine: rarer text would stutter
_SHARES = {True: 0.1, False: 0.01}  # of a core, by `spare`
_SLACK_S = 0.01  # tolerated earliness of a poll
_METRICS_S = {True: 0.5, False: 1.0}  # between two drawings of the decode view


class PollInterval:
    """Call `begin` before a poll, `drawn` once its changes are on the screen, then sleep `wait_s`."""

    def __init__(self) -> None:
        self.spare = True
        """True if decoding leaves a core free."""
        self._began: float | None = None  # processor time
        self._look_at = self._whole_at = 0.0  # time of the poll, and of the latest layout
        self._cost_s = 0.0  # of a poll and its drawing, a moving average

    @property
    def metrics_s(self) -> float:
        """Seconds between two drawings of the decode view."""
        return _METRICS_S[self.spare]

    def begin(self) -> None:
        """Start a poll."""
        self._began = time.process_time()
        self._look_at = time.monotonic()

    def whole(self) -> None:
        """Note that this poll lays out text again."""
        self._whole_at = self._look_at

    def quick(self) -> None:
        """Note that this poll showed its text without a layout."""
        self._began = None

    def with_figures(self) -> None:
        """Note that this poll draws metrics: its cost is not that of text."""
        self._began = None

    def drawn(self) -> None:
        """Measure the poll's cost at the first drawing after `begin`."""
        if self._began is not None:
            self._cost_s += 0.5 * (time.process_time() - self._began - self._cost_s)
            self._began = None

    def wait_s(self, *, awaiting: bool, idle: bool = False) -> float:
        """Return the seconds to sleep. awaiting: a request has no text yet. idle: nothing is asked."""
        if awaiting:
            interval = min(AWAITING_S, SHORTEST_S)
        elif idle:
            interval = SHORTEST_S * _IDLE
        else:
            interval = SHORTEST_S
        return max(0.0, self._look_at + interval - time.monotonic())

    @property
    def whole_s(self) -> float:
        """Seconds between two layouts of text."""
        return max(SHORTEST_S, min(self._cost_s / _SHARES[self.spare], _LONGEST_S))

    @property
    def whole_due(self) -> bool:
        """True if text may be laid out again."""
        return time.monotonic() >= self._whole_at + self.whole_s - _SLACK_S
