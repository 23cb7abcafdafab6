"""How often the chat takes in what the engine said: as often as is good to look at, where the cores are not needed.

Where decoding takes every core, whatever the chat's process does stops a kernel's thread meanwhile, and all others wait
for that one. There the rests grow with what the drawing costs, so that it takes a fixed share of a core.
"""

import time

SHORTEST_S = 0.1  # between two looks; the engine speaks as often while it answers, where cores are to spare
AWAITING_S = 0.05  # while an answer's first text is waited for
_LONGEST_S = 0.38  # however slow the machine: text that flows less often than this stutters
_SHARES = {True: 0.1, False: 0.008}  # of a core, by whether decoding leaves one over
_METRICS_S = {True: 0.5, False: 1.0}  # between two drawings of the decode view


class PollInterval:
    """`begin` before a look, `drawn` when what it brought is on the screen, then `rest_s`."""

    def __init__(self) -> None:
        self.spare = True
        """Whether decoding leaves a core to others."""
        self._began: float | None = None  # processor time
        self._cost_s = 0.0  # of a look and of drawing what it brought, the latest counting most

    @property
    def metrics_s(self) -> float:
        """Seconds between two drawings of the decode view."""
        return _METRICS_S[self.spare]

    def begin(self) -> None:
        """Look now."""
        self._began = time.process_time()

    def drawn(self) -> None:
        """Something is on the screen; the first time after `begin` it is what the look brought."""
        if self._began is not None:
            self._cost_s += 0.5 * (time.process_time() - self._began - self._cost_s)
            self._began = None

    def rest_s(self, *, answering: bool, awaiting: bool) -> float:
        """Seconds until the next look. `awaiting`: a request was made and there is no text yet."""
        if awaiting:
            return min(AWAITING_S, SHORTEST_S)
        if not answering:
            return SHORTEST_S
        return max(SHORTEST_S, min(self._cost_s / _SHARES[self.spare], _LONGEST_S))
