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
    """Return a delta. The text, and `more` of its step, are of the first step; of the answer's end without records.

    The text is content, unless `more` tells its kinds.
    """
    summary: Any = None
    more = more if "thinking" in more else {"content": text, **more}
    if not records:
        return Delta(generation, [Completed(text, Finished("stop", summary), **more)], ttft_s)
    first, *others = records
    parts = [TextChunk(text, Step((0,), first), pieces=(text,), **more)]
    parts += [TextChunk("", Step((0,), record), pieces=("",)) for record in others]
    return Delta(generation, parts, ttft_s)
