"""Prompt tokens of the next pass, from the measured speed of passes.

Alone, a prompt's chunks take about TARGET_S each. Beside decoding sequences, a chunk may stretch a pass to STRETCH
times the time of decoding alone. Times are medians of the newest passes (`runtime.metrics.running_median`).
"""

from headrace.runtime.engine.prefill import ChunkSizer
from headrace.runtime.metrics.running_median import RunningMedian

STRETCH = 2.4
SMALLEST = 8  # tokens: fewer hardly shorten a pass
STEP = 2  # tokens: granularity of a budget; on a slow machine hardly more than SMALLEST fit into a pass
_STEPS = 15  # passes of decoding sequences only; few, since their number of sequences changes
_CHUNKS = 7  # passes with prompts


class ChunkBudget:
    """The budget, from recorded pass times. wide: see `ChunkSizer`."""

    def __init__(self, *, wide: bool = False) -> None:
        self.alone = ChunkSizer(wide=wide)
        self._step_s = RunningMedian(_STEPS)  # of a pass of decoding sequences only
        self._token_s = RunningMedian(_CHUNKS)  # added by a prompt token

    def budget(self, with_decoding: bool) -> int:
        """Return the prompt tokens of the next pass, with decoding sequences in it or alone."""
        if not with_decoding:
            return self.alone.size
        step_s = self._step_s.median
        token_s = self._token_s.median
        if step_s is None or token_s is None:
            return SMALLEST
        affordable = int((STRETCH - 1) * step_s / max(token_s, 1e-9))
        return max(SMALLEST, min(self.alone.size, affordable // STEP * STEP))

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record the time of a pass of `decoding` sequences and so many prompt tokens."""
        if not prompt_tokens:
            self._step_s.add(seconds)
            return
        if not decoding:
            self.alone.record(prompt_tokens, seconds)
            self._token_s.add(seconds / prompt_tokens)
            return
        step_s = self._step_s.median
        if step_s is not None:
            self._token_s.add(max(0.0, seconds - step_s) / prompt_tokens)
