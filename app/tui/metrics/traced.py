"""The latest turn's sequences for a trace-event file; times count from the request.

`ChatState.export_trace` passes them to `app.output.trace_file`, which has the format.

Guard: tests/app/output/test_trace_file.py.
"""

from headrace.app.output.trace_file import TracedSequence, TraceSpan
from headrace.app.tui.metrics.answers import AnswerRow
from headrace.app.tui.metrics.live import LiveMetrics


def traced(metrics: LiveMetrics) -> list[TracedSequence]:
    """Return the latest answer, or each parallel answer. Steps that are no longer kept are left out."""
    if metrics.answers.is_several:
        rows = [row for row in metrics.answers.rows if row.records]
        return [_sequence(f"sequence {row.number}", row, row.ttft_s, []) for row in rows]
    first = metrics.first_token
    if not metrics.answer.records:
        return []
    spans: list[TraceSpan] = []
    first_end_s = None
    if first is not None:
        at = 0.0
        for name, seconds in (("wait", first.wait_s), ("tokenize", first.tokenize_s), ("prefill", first.prefill_s)):
            tokens = metrics.answer.prefill_total if name == "prefill" else None
            if seconds > 0:
                spans.append(TraceSpan(name, at, at + seconds, tokens))
            at += seconds
        first_end_s = at + first.step_s
    return [_sequence("answer", metrics.answer, first_end_s, spans)]


def _sequence(name: str, row: AnswerRow, first_end_s: float | None, before: list[TraceSpan]) -> TracedSequence:
    """Return a sequence, whose kept steps begin with the first one or later.

    name: in the trace.
    row: its records.
    first_end_s: end of its first step; None if that is not known.
    before: spans before its first step.
    """
    steps = list(row.records)
    oldest = steps[0]
    has_first = oldest.index == 0
    end = first_end_s
    if end is None:
        end = oldest.latency_s if has_first else 0.0
    if has_first:
        start = end - oldest.latency_s
    else:
        start = end + row.dropped_s  # the time of the steps that are no longer kept
    return TracedSequence(name, before, max(0.0, start), steps)
