"""Trace-event files: valid by the format, slices nested, durations as recorded. Random steps and real answers."""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.app.engine.events import Prefill
from headrace.app.output.trace_file import TracedSequence, TraceSpan, prefill_spans, trace
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.traced import traced
from headrace.runtime.metrics.telemetry import StepParts, StepRecord
from tests.support.deltas import delta, delta_of
from tests.support.scripted_engine import CARD, record

METADATA = {"process_name", "thread_name"}


def check(document: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Raise AssertionError for a document that is no trace-event file. Return its slices by track and category."""
    parsed = json.loads(json.dumps(document, allow_nan=False))
    assert set(parsed) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert parsed["displayTimeUnit"] in ("ms", "ns")
    slices = defaultdict(list)
    for event in parsed["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            assert isinstance(event["args"]["name"], str)
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            category = "part" if event["cat"] in ("computed", "timed") else event["cat"]
            slices[event["tid"], category].append(event)
    for events in slices.values():  # of a category: in order, none over another
        for before, after in pairwise(events):
            assert after["ts"] >= end(before) - 1e-3
    for (track, category), events in slices.items():
        if category == "part":  # parts fill their step
            starts = [part["ts"] for part in events]
            for step in slices[track, "decode"]:
                inside = events[bisect_left(starts, step["ts"]) : bisect_left(starts, end(step) - 5e-4)]
                assert all(end(part) <= end(step) + 1e-3 for part in inside)
                if inside and step["dur"] > 0:
                    assert math.isclose(sum(part["dur"] for part in inside), step["dur"], abs_tol=1e-2)
    return slices


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def steps_of(drawn: list[tuple[float, int, int]]) -> list[StepRecord]:
    found = []
    for index, (latency, proposed, accepted) in enumerate(drawn):
        said = min(proposed, accepted)
        one = replace(record(index, 20 + index), latency_s=latency, proposed=proposed, accepted=said)
        parts = StepParts(*(latency * share for share in (0.5, 0.1, 0.05, 0.1, 0.0))) if index % 3 == 2 else None
        found.append(replace(one, source="ngram" if proposed else None, parts=parts))
    return found


STEPS = st.lists(
    st.tuples(st.just(0.0) | st.floats(1e-6, 1e-3) | st.floats(0.001, 100), st.integers(0, 4), st.integers(0, 4)),
    max_size=12,
)


@given(st.lists(STEPS, max_size=3), st.none() | st.floats(0.1, 1e4), st.lists(st.floats(0, 5), max_size=5))
def test_any_steps_make_a_valid_file(
    streams: list[list[tuple[float, int, int]]], bandwidth: float | None, waits: list[float]
) -> None:
    ends = [sum(waits[: n + 1]) for n in range(len(waits))]
    before = [TraceSpan("tokenize", 0.0, 0.0), *prefill_spans(0.0, [(at, 32 * n) for n, at in enumerate(ends, 1)])]
    start = sum(waits)
    sequences = [TracedSequence(f"sequence {n}", before, start, steps_of(drawn)) for n, drawn in enumerate(streams)]
    slices = check(trace(sequences, bandwidth, {"model": "m"}))
    for number, drawn in enumerate(streams):
        events = slices[2 * number + 1, "decode"]
        assert len(events) == len(drawn)
        assert math.isclose(sum(event["dur"] for event in events), sum(1e6 * one[0] for one in drawn), abs_tol=0.1)
        assert len(slices[2 * number + 2, "draft"]) == sum(proposed > 0 for _, proposed, _ in drawn)
    assert prefill_spans(1.0, [(2.0, 0), (3.0, 32), (4.0, 32)]) == [TraceSpan("prefill chunk", 2.0, 3.0, 32)]


def test_the_view_traces_the_latest_answer_or_all_parallel_ones() -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    assert traced(metrics) == []
    metrics.submitted()
    metrics.take([Prefill(1, 30, 30, 0, waited_s=0.01, tokenize_s=0.002)])
    metrics.take([delta_of([record(n, 20 + n) for n in range(5000)])])
    metrics.take([delta_of((), 0.1)])
    (sequence,) = traced(metrics)
    assert len(sequence.steps) == 4096
    total = math.fsum(record(n, 20 + n).latency_s for n in range(1, 5000))
    last = sequence.steps_from_s + math.fsum(step.latency_s for step in sequence.steps)
    assert math.isclose(last, metrics.first_token.ttft_s + total, rel_tol=1e-6)  # type: ignore[union-attr]
    assert [span.name for span in sequence.before] == ["wait", "tokenize", "prefill"]
    check(trace([sequence], 54.0, {}))
    metrics.begin_batch([1, 2])
    for generation in (1, 2):
        records = [record(n, 20 + n, batch=2) for n in range(9)]
        metrics.take([delta(generation, "x", records, ttft_s=0.2)])
    several = traced(metrics)
    assert [sequence.name for sequence in several] == ["sequence 1", "sequence 2"]
    assert math.isclose(several[0].steps_from_s, 0.2 - several[0].steps[0].latency_s)
    slices = check(trace(several, 54.0, {}))
    assert len(slices[3, "decode"]) == 9


def replayed(text: str) -> list[tuple[int, str, int, int]]:
    """Return the slices that Perfetto's trace processor keeps: (track, name, depth, nanoseconds).

    Its rules, of `JsonTraceParser` and `SliceTracker::MaybeCloseStack`: times are rounded to nanoseconds, events are
    sorted by them, a track is a stack, and a slice that overlaps an open one without lying inside it is dropped.
    """
    events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: round(event["ts"] * 1000))
    stacks: dict[int, list[tuple[int, int]]] = defaultdict(list)  # track: (end, duration)
    kept = []
    for event in events:
        start = round(event["ts"] * 1000)
        duration = round(event["dur"] * 1000)
        stack = stacks[event["tid"]]
        while stack and (stack[-1][0] < start or (stack[-1][0] == start and not stack[-1][1] == duration == 0)):
            stack.pop()
        if stack and start < stack[-1][0] < start + duration:
            continue
        stack.append((start + duration, duration))
        kept.append((event["tid"], event["name"], len(stack) - 1, duration))
    return kept


@given(st.lists(STEPS, min_size=1, max_size=3), st.none() | st.floats(0.1, 1e4))
def test_slices_of_a_trace_are_nested_as_perfetto_requires(
    streams: list[list[tuple[float, int, int]]], bandwidth: float | None
) -> None:
    sequences = [TracedSequence(f"sequence {n}", [], 0.1, steps_of(drawn)) for n, drawn in enumerate(streams)]
    document = trace(sequences, bandwidth, {})
    kept = replayed(json.dumps(document))
    assert len(kept) == sum(event["ph"] == "X" for event in document["traceEvents"])
    for number, drawn in enumerate(streams):
        steps = [each for each in kept if each[0] == 2 * number + 1 and each[1].startswith("step ")]
        assert {depth for _, _, depth, duration in steps if duration} <= {0}
        assert all(abs(each[3] - one[0] * 1e9) <= 1 for each, one in zip(steps, drawn, strict=True))


def test_overlapping_slices_are_detected_by_the_check() -> None:
    document = trace([TracedSequence("one", [], 0.0, steps_of([(0.001, 0, 0), (0.001, 0, 0)]))], None, {})
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    slices[0]["dur"] += 0.001
    assert len(replayed(json.dumps(document))) == 1
