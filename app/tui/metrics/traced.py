"""The latest turn's sequences for a trace-event file; times count from the request.

`ChatState.export_trace` passes them to `app.output.trace_file`, which has the format.
"""

from headrace.app.output.trace_file import Span, TracedSequence
from headrace.app.tui.metrics.answers import Row
from headrace.app.tui.metrics.live import LiveMetrics


def traced(metrics: LiveMetrics) -> list[TracedSequence]:
    """Return the latest answer, or each parallel answer. Steps that are no longer kept are left out."""
    if metrics.answers.is_several:
        rows = [row for row in metrics.answers.rows if row.records]
        return [_sequence(f"sequence {row.number}", row, row.ttft_s, []) for row in rows]
    first = metrics.first_token
    if not metrics.answer.records:
        return []
    spans = []
    at = 0.0
    parts = (("wait", first.wait_s), ("tokenize", first.tokenize_s), ("prefill", first.prefill_s)) if first else ()
    for name, seconds in parts:
        tokens = metrics.answer.prefill_total if name == "prefill" else None
        if seconds > 0:
            spans.append(Span(name, at, at + seconds, tokens))
        at += seconds
    ttft_s = first.wait_s + first.tokenize_s + first.prefill_s + first.step_s if first else None
    return [_sequence("answer", metrics.answer, ttft_s, spans)]


def _sequence(name: str, row: Row, first_end_s: float | None, before: list[Span]) -> TracedSequence:
    """Return a sequence. first_end_s: end of its first step."""
    steps = list(row.records)
    end = first_end_s if first_end_s is not None else steps[0].latency_s * (steps[0].index == 0)
    start = end - steps[0].latency_s if steps[0].index == 0 else end + row.dropped_s
    return TracedSequence(name, before, max(0.0, start), steps)
