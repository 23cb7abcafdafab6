"""Sizes of a prompt's chunks: by the measured speed of passes, and by the marks that its cache needs.

Chunks follow the measured speed, for progress and cancellation about every TARGET_S, and so that a prompt delays
decoding sequences by a bounded factor. `Scheduler` asks for the budget of each pass, and `BatchClock` records its time.
`prefill` sizes chunks outside of steps.

Guard: tests/runtime/engine/test_prompt_chunks.py.
"""

import mlx.core as mx

from headrace.runtime.metrics.running_median import RunningMedian

TARGET_S = 0.4  # of a chunk: an answer to Ctrl+C, and a progress bar that moves
FIRST = 32  # tokens of the first chunk ever, before any speed is known
CHUNK_STEP = 32  # chunks are rounded to a multiple of it
WIDE = 1024  # tokens of a wide chunk, at least
WIDE_S = 2.0  # that a wide chunk may take; on slower machines chunks follow TARGET_S
# Tokens of a chunk; bounds working memory. A GPU needs many rows to be busy.
LARGEST = {mx.DeviceType.cpu: 512, mx.DeviceType.gpu: 2048}
# Factor by which a joining prompt may lengthen the passes of decoding sequences. With more, its own first token comes
# sooner, and theirs later; `headrace bench --arrivals` measures both.
STRETCH = 2.4
SMALLEST = 8  # tokens of a prompt in a pass with decoding sequences: fewer hardly shorten it
BUDGET_STEP = 2  # tokens: granularity of a budget; on a slow machine hardly more than SMALLEST fit into a pass
_STEPS = 15  # passes of decoding sequences only, in the median; few, since their number of sequences changes
_CHUNKS = 7  # passes with prompts, in the median
OPENING = 16  # tokens: at least as many as templates open an answer with


class ChunkSizer:
    """Tokens of the next chunk, from the last chunk's speed; kept from prompt to prompt.

    wide: the network wants at least WIDE rows, see `Network.wide_chunks`.
    """

    def __init__(self, device: mx.DeviceType | None = None, *, wide: bool = False) -> None:
        self.size = FIRST
        self._largest = LARGEST[device or mx.default_device().type]
        self._wide = wide and self._largest >= WIDE

    def record(self, tokens: int, seconds: float) -> None:
        """Record a chunk's time."""
        rate = tokens / max(seconds, 1e-6)
        affordable = int(rate * TARGET_S)
        if self._wide and rate * WIDE_S >= WIDE:
            affordable = max(affordable, WIDE)
        self.size = max(CHUNK_STEP, min(self._largest, affordable // CHUNK_STEP * CHUNK_STEP))


class ChunkBudget:
    """Prompt tokens of the next pass, from the measured speed of passes.

    Alone, a prompt's chunks take about TARGET_S each. Next to decoding sequences, a chunk may stretch a pass to STRETCH
    times the time of decoding alone. Times are medians of the newest passes.
    wide: see `ChunkSizer`.
    """

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
        # A pass may take STRETCH times as long as its decode rows alone: what is left is for tokens of prompts.
        affordable = int((STRETCH - 1) * step_s / max(token_s, 1e-9))
        return max(SMALLEST, min(self.alone.size, affordable // BUDGET_STEP * BUDGET_STEP))

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


def chunk_end(done: int, prompt: int, marks: bool, branch_point: int = 0) -> int:
    """Return the latest end of the chunk that begins at `done` of `prompt` entries.

    done: entries that the prompt has.
    prompt: entries that its prefill makes.
    marks: the cache goes back to marked lengths only, and a mark is set at the end of a chunk.
    branch_point: entries in common with the next prompt of the queue; 0 for none.

    With marks, one is set OPENING tokens before the end: the next prompt may open this answer differently, if a
    template drops its thinking. Another is set at `branch_point`, where the next prompt differs.
    """
    if not marks:
        return prompt
    return min((edge for edge in (branch_point, prompt - OPENING) if done < edge < prompt), default=prompt)
