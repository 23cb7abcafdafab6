"""The measured speed of passes, and how many prompt tokens the next one may take for it.

Alone, a prompt's chunks take about TARGET_S each. Beside sequences that decode they are as long as lets a pass take
STRETCH times what the decoding alone takes: those sequences keep flowing, and the prompt gets the rest of the time.
"""

from headrace.runtime.prefill import ChunkSizer

STRETCH = 2.4
SMALLEST = 8  # tokens: fewer make a pass hardly shorter
STEP = 2  # tokens that a budget grows by: on a slow machine hardly more than SMALLEST fit into a pass
_NEW = 0.2  # the weight of a new measurement


class Pace:
    """Fed with what passes took."""

    def __init__(self) -> None:
        self.alone = ChunkSizer()
        self._step_s: float | None = None  # a pass of decoding sequences only
        self._token_s: float | None = None  # what a prompt's token adds to it

    def budget(self, beside: bool) -> int:
        """Prompt tokens that the next pass may take, beside decoding sequences or alone."""
        if not beside:
            return self.alone.size
        if self._step_s is None or self._token_s is None:
            return SMALLEST
        affordable = int((STRETCH - 1) * self._step_s / max(self._token_s, 1e-9))
        return max(SMALLEST, min(self.alone.size, affordable // STEP * STEP))

    def took(self, rows: int, fed: int, seconds: float) -> None:
        """So long for a pass of `rows` decoding sequences and `fed` tokens of prompts."""
        if not fed:
            self._step_s = _moved(self._step_s, seconds)
        elif not rows:
            self.alone.took(fed, seconds)
            self._token_s = _moved(self._token_s, seconds / fed)
        elif self._step_s is not None:
            self._token_s = _moved(self._token_s, max(0.0, seconds - self._step_s) / fed)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _NEW * (value - mean)
