"""Trace-event files of answers, for Perfetto (ui.perfetto.dev) and chrome://tracing.

`headrace run --trace` and the chat write them; both make `TracedSequence`s of their step records.

The JSON object form of the "Trace Event Format": complete events (X) with microseconds, counters (C), names (M). One
process; each sequence has a track, and one more with its draft tokens. A step's parts are sums by kind of work, as
timed in the kernels; else they are computed: its bytes at the memory bandwidth, and the rest.

Guard: tests/app/output/test_trace_file.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from headrace.runtime.metrics.telemetry import StepRecord

_PID = 1  # of the only process of the file; any number does


class TraceSpan(Struct, frozen=True):
    """A named time before decoding."""

    name: str
    start_s: float  # from the request
    end_s: float
    tokens: int | None = None  # computed prompt tokens; None if it computes none


class TracedSequence(Struct, frozen=True):
    """One sequence.

    name: of its track.
    before: spans before decoding.
    steps_from_s: start of the first of `steps`, in seconds from the request.
    steps: in order.
    """

    name: str
    before: Sequence[TraceSpan]
    steps_from_s: float
    steps: Sequence[StepRecord]


def prefill_spans(start_s: float, chunks: Sequence[tuple[float, int]]) -> list[TraceSpan]:
    """Return a span for each chunk. chunks: (end in seconds, tokens computed by then), in order."""
    ends = [(start_s, 0), *chunks]
    return [
        TraceSpan("prefill chunk", begin, end, done - before)
        for (begin, before), (end, done) in pairwise(ends)
        if done > before
    ]


def trace(
    sequences: Sequence[TracedSequence], memory_gb_s: float | None, about: Mapping[str, str]
) -> dict[str, object]:
    """Return the JSON document.

    sequences: with their steps.
    memory_gb_s: bandwidth, from which the parts of steps follow; None leaves them out.
    about: model, machine.
    """
    events: list[dict[str, object]] = [_named("process_name", 0, "headrace")]
    for number, sequence in enumerate(sequences):
        track = 2 * number + 1  # the next one is that of its draft tokens
        events.append(_named("thread_name", track, sequence.name))
        for span in sequence.before:
            arguments = {}
            if span.tokens is not None:
                arguments["tokens"] = span.tokens
            events.append(_slice(span.name, "prefill", track, _ns(span.start_s), _ns(span.end_s), arguments))
        if any(step.proposed for step in sequence.steps):
            events.append(_named("thread_name", track + 1, f"{sequence.name}: draft tokens"))
        events += _steps(sequence, track, memory_gb_s)
    note = "bytes and parts of steps are computed from shapes and measured bandwidth, not read from a counter"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "note": note}}


def _steps(sequence: TracedSequence, track: int, memory_gb_s: float | None) -> Iterator[dict[str, object]]:
    start_s = sequence.steps_from_s
    for step in sequence.steps:
        start = _ns(start_s)
        end = _ns(start_s + step.latency_s)
        start_s += step.latency_s
        yield _slice(f"step {step.index}", "decode", track, start, end, _arguments(step))
        for name, begin, stop in _parts(step, start, end, memory_gb_s):
            yield _slice(name, "computed" if step.parts is None else "timed", track, begin, stop, {})
        if step.proposed:
            drafts = {"proposed": step.proposed, "accepted": step.accepted, "source": step.source or ""}
            name = f"{step.accepted} of {step.proposed} accepted"
            yield _slice(name, "draft", track + 1, start, end, drafts)
        yield _event("C", f"context, {sequence.name}", end, track, {"tokens": step.context})


def _parts(step: StepRecord, start: int, end: int, memory_gb_s: float | None) -> list[tuple[str, int, int]]:
    """Return (name, start, end) of a step's parts, which fill it: sums by kind of work, one after the other.

    Timed ones are as measured. Computed ones are reading, at most the whole step, and the rest. Nanoseconds.
    """
    if step.parts is not None:
        ends = [start]
        for seconds in step.parts.named().values():
            ends.append(min(end, ends[-1] + _ns(seconds)))
        names = [*step.parts.named(), "the rest"]
        timed = [(name, *span) for name, span in zip(names, pairwise([*ends, end]), strict=True)]
        return _with_length(timed)
    if not memory_gb_s or end <= start:
        return []
    reading = min(end - start, round(step.step_bytes / memory_gb_s))  # 1 byte / (GB/s) is 1 ns
    read = start + reading
    weights_read = start + round(reading * step.weight_bytes / max(1, step.step_bytes))
    parts = [("read weights", start, weights_read)]
    if step.kv_bytes_read or step.kv_bytes_written:
        parts.append(("read and write K/V", weights_read, read))
    parts.append(("not reading", read, end))
    return _with_length(parts)


def _with_length(parts: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return [(name, start, end) for name, start, end in parts if end > start]


def _arguments(step: StepRecord) -> dict[str, object]:
    return {
        "context": step.context,
        "tokens": step.tokens,
        "batch": step.batch,
        "weight_bytes": step.weight_bytes,
        "kv_bytes_read": step.kv_bytes_read,
        "kv_bytes_written": step.kv_bytes_written,
        "achieved_gb_s": step.achieved_gb_s,
    }


def _slice(
    name: str, category: str, track: int, start: int, end: int, arguments: Mapping[str, object]
) -> dict[str, object]:
    """Return the event of a bar on a track, from `start` to `end` in nanoseconds; viewers show the arguments of it."""
    end = max(start, end)
    return {**_event("X", name, start, track, arguments), "cat": category, "dur": (end - start) / 1000}


def _named(kind: str, track: int, name: str) -> dict[str, object]:
    return _event("M", kind, 0, track, {"name": name})


def _event(phase: str, name: str, start: int, track: int, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return an event. start: nanoseconds; the file has microseconds."""
    return {"ph": phase, "name": name, "ts": start / 1000, "pid": _PID, "tid": track, "args": arguments}


def _ns(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e9)
