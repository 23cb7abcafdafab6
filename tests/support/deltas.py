"""Deltas of answers for tests, of the text and the records of their steps."""

from collections.abc import Sequence
from typing import Any

from headrace.app.engine.events import Delta
from headrace.app.engine.telemetry import textless
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.engine.request import Finished, Step
from headrace.runtime.metrics.telemetry import StepRecord


def delta_of(records: Sequence[StepRecord], ttft_s: float | None = None) -> Delta:
    """Return a delta of steps without text."""
    return Delta(1, [textless(record) for record in records], ttft_s, has_steps=False)


def delta(
    generation: int,
    text: str = "",
    records: Sequence[StepRecord] = (),
    ttft_s: float | None = None,
    **more: Any,
) -> Delta:
    """Return a delta of steps, or without records the end of an answer.

    text: of the first step, or of the end. It is content, unless `more` has its thinking.
    ttft_s: time to first token, if this delta has that token.
    more: other fields of the first step's `TextChunk`, or of `Completed`.
    """
    summary: Any = None
    if "thinking" not in more:
        more = {"content": text, **more}
    if not records:
        return Delta(generation, [Completed(text, Finished("stop", summary), **more)], ttft_s)
    first, *others = records
    parts = [TextChunk(text, Step((0,), first), pieces=(text,), **more)]
    parts += [TextChunk("", Step((0,), record), pieces=("",)) for record in others]
    return Delta(generation, parts, ttft_s)
