"""The measured speed of passes, and how many prompt tokens the next one may take for it.

Alone, a prompt's chunks take about TARGET_S each. Beside sequences that decode they are as long as lets a pass take
STRETCH times what the decoding alone takes: those sequences keep flowing, and the prompt gets the rest of the time.
Measured are medians of the newest passes (`runtime.metrics.running_median`).
"""

from headrace.runtime.engine.prefill import ChunkSizer
from headrace.runtime.metrics.running_median import RunningMedian

STRETCH = 2.4
SMALLEST = 8  # tokens: fewer make a pass hardly shorter
STEP = 2  # tokens that a budget grows by: on a slow machine hardly more than SMALLEST fit into a pass
_STEPS = 15  # passes of decoding sequences only that are looked at; they soon forget another number of sequences
_CHUNKS = 7  # passes with prompts beside: a token costs more with every one


class Pace:
    """Fed with what passes took."""

    def __init__(self) -> None:
        self.alone = ChunkSizer()
        self._step_s = RunningMedian(_STEPS)  # a pass of decoding sequences only
        self._token_s = RunningMedian(_CHUNKS)  # what a prompt's token adds to it

    def budget(self, beside: bool) -> int:
        """Prompt tokens that the next pass may take, beside decoding sequences or alone."""
        if not beside:
            return self.alone.size
        step_s, token_s = self._step_s.median, self._token_s.median
        if step_s is None or token_s is None:
            return SMALLEST
        affordable = int((STRETCH - 1) * step_s / max(token_s, 1e-9))
        return max(SMALLEST, min(self.alone.size, affordable // STEP * STEP))

    def took(self, rows: int, fed: int, seconds: float) -> None:
        """So long for a pass of `rows` decoding sequences and `fed` tokens of prompts."""
        if not fed:
            self._step_s.add(seconds)
        elif not rows:
            self.alone.took(fed, seconds)
            self._token_s.add(seconds / fed)
        elif (step_s := self._step_s.median) is not None:
            self._token_s.add(max(0.0, seconds - step_s) / fed)
