"""How often the chat takes in what the engine said: text flows ten times a second, figures change once or twice.

Where decoding takes every core, whatever the chat's process does stops a kernel's thread meanwhile, and all others wait
for that one. There looks at what is dear to lay out (a long table) become rarer, so that they take a fixed share of a
core, and figures are drawn half as often.
"""

import time

SHORTEST_S = 0.095  # from look to look; the engine speaks more often while it answers, so that each one finds text
AWAITING_S = 0.05  # while an answer's first text is waited for
_LONGEST_S = 0.38  # however slow the machine: text that flows less often than this stutters
_SHARES = {True: 0.1, False: 0.01}  # of a core, by whether decoding leaves one over
_SLACK_S = 0.01  # a look that comes so much too early is in time
_METRICS_S = {True: 0.5, False: 1.0}  # between two drawings of the decode view


class PollInterval:
    """`begin` before a look, `drawn` when what it brought is on the screen, then `wait_s`."""

    def __init__(self) -> None:
        self.spare = True
        """Whether decoding leaves a core to others."""
        self._began: float | None = None  # processor time
        self._look_at = self._whole_at = 0.0  # when it was, and the latest that laid out text anew
        self._cost_s = 0.0  # of a look and of drawing what it brought, the latest counting most

    @property
    def metrics_s(self) -> float:
        """Seconds between two drawings of the decode view."""
        return _METRICS_S[self.spare]

    def begin(self) -> None:
        """LayoutOptions now."""
        self._began, self._look_at = time.process_time(), time.monotonic()

    def whole(self) -> None:
        """This look lays text out anew."""
        self._whole_at = self._look_at

    def quick(self) -> None:
        """This look has shown its text without that."""
        self._began = None

    def with_figures(self) -> None:
        """This look draws more than text, which has a time of its own: its cost tells nothing of the others'."""
        self._began = None

    def drawn(self) -> None:
        """Something is on the screen; the first time after `begin` it is what the look brought."""
        if self._began is not None:
            self._cost_s += 0.5 * (time.process_time() - self._began - self._cost_s)
            self._began = None

    def wait_s(self, *, awaiting: bool) -> float:
        """Seconds to sleep now. awaiting: a request was made and there is no text yet."""
        rest = min(AWAITING_S, SHORTEST_S) if awaiting else SHORTEST_S
        return max(0.0, self._look_at + rest - time.monotonic())

    @property
    def whole_s(self) -> float:
        """Seconds from one drawing that lays out text anew to the next."""
        return max(SHORTEST_S, min(self._cost_s / _SHARES[self.spare], _LONGEST_S))

    @property
    def whole_due(self) -> bool:
        """Whether text may be laid out anew."""
        return time.monotonic() >= self._whole_at + self.whole_s - _SLACK_S
