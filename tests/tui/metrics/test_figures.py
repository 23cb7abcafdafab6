"""Figures of the decode view, recomputed from the steps of the same run: parts of a step, windows, the trail."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.app.tui.decode.step import StepSection
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.figures import Trail, decode_point, latency_window, step_bytes
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import StepTotals
from headrace.runtime.metrics.telemetry import Percentiles, StepParts, StepRecord
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, COST, record

SECONDS = st.just(0.0) | st.floats(1e-6, 1e-3) | st.floats(1e-3, 0.1) | st.floats(1, 60)
PARTS = st.none() | st.builds(StepParts, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
STREAM = st.lists(st.tuples(SECONDS, PARTS, st.integers(0, 3), st.integers(0, 3)), max_size=60)


def stream(drawn: list[tuple[float, StepParts | None, int, int]]) -> list[StepRecord]:
    found = []
    context = 20
    for index, (latency, parts, proposed, accepted) in enumerate(drawn):
        said = min(proposed, accepted)
        context += 1 + said
        one = replace(record(index, context), latency_s=latency, parts=parts, proposed=proposed, accepted=said)
        found.append(replace(one, source="ngram" if proposed else None))
    return found


def fed(steps: list[StepRecord], measured: float | None = 54.0) -> LiveMetrics:
    metrics = LiveMetrics()
    model, machine = facts(CARD)
    cost = replace(COST, weight_parts=[("attention", 20_000_000), ("MLP", 60_000_000), ("head", 15_000_000)])
    metrics.ready(replace(model, cost=cost), replace(machine, measured_gb_s=measured))
    metrics.submitted()
    if steps:
        metrics.take([delta_of(steps)])
    return metrics


@given(STREAM, st.none() | st.floats(0.01, 1e4))
def test_parts_are_never_negative_and_sum_to_the_whole(
    drawn: list[tuple[float, StepParts | None, int, int]], measured: float | None
) -> None:
    metrics = fed(stream(drawn), measured)
    times = metrics.step_times
    figures = metrics.figures
    assert all(value >= 0 for _, value in metrics.step_bytes)
    assert math.isclose(math.fsum(value for _, value in metrics.step_bytes), figures.step_bytes, rel_tol=1e-9)
    if times is None:
        return
    assert times.total_s == figures.step_s
    assert all(value >= 0 for _, value in times.parts)
    assert math.isclose(math.fsum(value for _, value in times.parts), times.total_s, rel_tol=1e-9)
    timed = [step for step in metrics.answer.records if step.parts is not None and step.latency_s > 0]
    assert times.timed == min(16, len(timed))


def test_timed_parts_are_the_means_of_the_timed_steps() -> None:
    parts = StepParts(weights_s=0.003, kv_s=0.001, sampling_s=0.0005, waiting_s=0.0002, host_s=0.0)
    steps = [replace(record(n, 20 + n), latency_s=0.006, parts=parts if n % 4 == 3 else None) for n in range(40)]
    metrics = fed(steps)
    times = metrics.step_times
    assert times is not None
    assert (times.timed, times.every) == (10, 4)
    wanted = {"weights": 3, "KV": 1, "the rest": 1.3, "sampling": 0.5, "host": 0, "waiting": 0.2}
    assert {name: round(seconds * 1e3, 6) for name, seconds in times.parts} == wanted


@pytest.mark.parametrize(
    ("timed", "count", "expected"),
    [
        ([1, 2, 3, 4], 5, "every step timed"),
        ([1, 2, 3, 4], 10, "4 of 9 steps timed"),
        ([1, 2, 3, 4, 20, 36], 40, "1 step in 16 timed"),
        (list(range(40)), 40, "every step timed"),
        ([], 40, "time of bytes computed, not timed here"),
    ],
)
def test_the_subtitle_names_the_steps_that_were_timed(timed: list[int], count: int, expected: str) -> None:
    parts = StepParts(weights_s=0.003, kv_s=0.001, sampling_s=0.0005, waiting_s=0.0002, host_s=0.0)
    metrics = fed([replace(record(n, 20 + n), parts=parts if n in timed else None) for n in range(count)])
    section = StepSection(metrics)
    section.lines(metrics, 60, 8)
    assert str(section.border_subtitle) == expected


def test_untimed_parts_are_bytes_over_bandwidth() -> None:
    steps = [replace(record(n, 20 + n), latency_s=0.006) for n in range(40)]
    metrics = fed(steps, measured=54.0)
    times = metrics.step_times
    assert times is not None
    assert times.timed == 0
    (weights, kv, rest) = (seconds for _, seconds in times.parts)
    kv_bytes = sum(step.kv_bytes_read + step.kv_bytes_written for step in steps[1:]) / 39
    assert math.isclose(weights, COST.weight_bytes / 54e9, rel_tol=1e-9)
    assert math.isclose(kv, kv_bytes / 54e9, rel_tol=1e-9)
    assert math.isclose(rest, 0.006 - weights - kv, rel_tol=1e-9)
    assert dict(metrics.step_bytes) == {
        "attention": 20e6, "MLP": 60e6, "head": 15e6, "other weights": 3e6, "KV": metrics.figures.step_bytes - 98e6,
    }  # fmt: skip
    assert step_bytes(metrics.figures, None) == []


@given(STREAM, st.integers(1, 80), st.integers(0, 30))
def test_latency_figures_are_those_of_the_visible_steps(
    drawn: list[tuple[float, StepParts | None, int, int]], count: int, back: int
) -> None:
    metrics = fed(stream(drawn))
    window = latency_window(metrics.latency_steps, metrics.latencies, metrics.busy_steps, count, back=back)
    after = [step for step in metrics.answer.records if step.index]
    shown = after[max(0, len(after) - back - count) : max(0, len(after) - back)]
    if window is None:
        assert not shown
        return
    assert list(window.steps) == shown
    assert window.percentiles == Percentiles.of([step.latency_s for step in after])
    slow = {place for place, step in enumerate(shown) if step.latency_s >= 3 * window.percentiles.p50 > 0}
    assert set(window.stalls) == (slow if len(after) >= 8 else set())


@given(STREAM)
def test_points_of_the_roofline_have_the_flops_and_bytes_of_their_steps(
    drawn: list[tuple[float, StepParts | None, int, int]],
) -> None:
    """The turn's totals are cut into points of half a second; together they are the turn, up to the last one."""
    trail = Trail()
    totals = StepTotals()
    points = 0
    for step in stream(drawn):
        totals.add(step, COST)
        trail.add(totals)
        points += len(trail.points) > points
    assert len(trail.points) == points
    for point in trail.points:
        assert 0 < point.intensity < math.inf
        assert 0 < point.flops < math.inf
    metrics = fed(stream(drawn))
    point = decode_point(metrics.totals)
    if point is not None:
        assert math.isclose(point.flops, metrics.totals.flops / metrics.totals.seconds)
        assert math.isclose(point.intensity, metrics.totals.flops / metrics.totals.nbytes)


def test_a_new_turn_clears_the_points_of_the_roofline() -> None:
    metrics = fed([])
    for n in range(20):
        metrics.take([delta_of([replace(record(n, 20 + n), latency_s=0.3)])])
    assert len(metrics.trail.points) == 9
    metrics.submitted()
    assert metrics.trail.points == []
