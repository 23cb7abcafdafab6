"""Random step streams: drafts, batches, preemption, stalls, zero-length clocks. No figure is absurd on any surface."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.app.answer.sentence import sentence
from headrace.app.engine.events import Abandoned, BatchStatus
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.panel import SECTIONS
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.metrics.telemetry import StepRecord
from tests.support.deltas import delta, delta_of
from tests.support.scripted_engine import CARD, COST, record

LATENCIES = st.just(0.0) | st.floats(1e-5, 1e-4) | st.floats(1e-3, 0.05) | st.floats(1.0, 60.0)
STEPS = st.lists(
    st.tuples(LATENCIES, st.integers(0, 7), st.integers(0, 7), st.sampled_from([1, 1, 1, 2, 8])), max_size=40
)
Machine = tuple[float | None, float | None, float | None, bool]
MACHINES = st.tuples(
    st.none() | st.floats(0.1, 1e4), st.none() | st.floats(0.1, 1e4), st.none() | st.floats(1e6, 1e15), st.booleans()
)


def records(steps: list[tuple[float, int, int, int]]) -> list[StepRecord]:
    found = []
    context = 20
    for index, (latency, proposed, accepted, batch) in enumerate(steps):
        said = min(proposed, accepted)
        context += 1 + said
        one = replace(record(index, context, batch), latency_s=latency, proposed=proposed, accepted=said)
        found.append(replace(one, source="ngram" if proposed else None))
    return found


def fed(machine: Machine) -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    measured, beside, compute, crowded = machine
    metrics.machine = replace(
        metrics.machine, measured_gb_s=measured, memory_gb_s=beside if measured else None, compute_flops=compute
    )
    for _ in range(2 * crowded):
        metrics.set_load(MachineLoad(2, 2.0, 0.5, 1 << 30, 2 << 30, 0, busiest="pip"))
    metrics.submitted()
    return metrics


def check(metrics: LiveMetrics) -> None:
    """Raise AssertionError for a figure that cannot be, in any section."""
    said = [sentence(metrics.figures)]
    for section in (*SECTIONS, MeterLines):
        for width, height in ((36, 6), (90, 16)):
            lines = [line.plain for line in section(metrics).lines(metrics, width, height)]
            assert all(len(line) <= width for line in lines), (section, lines)
            said += lines
    for line in said:
        assert not re.search(r"\bnan|\binf\b|(?<![\w.])-\d", line), line
    figures = metrics.figures
    text = said[0]
    if figures.share is not None and figures.share > 1.01:
        assert "above that" in text
    if metrics.mbu is not None and metrics.mbu > 1.01 and not metrics.answers.is_several:
        assert "above that" in text or figures.compute_bound


@settings(max_examples=25)
@given(STEPS, MACHINES, st.booleans())
def test_metrics_of_any_steps_of_one_sequence_agree(
    steps: list[tuple[float, int, int, int]], machine: Machine, ended: bool
) -> None:
    metrics = fed(machine)
    stream = [replace(one, batch=1) for one in records(steps)]
    if stream:
        metrics.take([delta_of(stream)])
    if ended:
        metrics.take([Abandoned(1)])
    check(metrics)
    totals = metrics.answer.totals
    after = stream[1:]
    assert (totals.steps, totals.tokens) == (len(after), sum(one.tokens for one in after))
    assert math.isclose(totals.seconds, math.fsum(one.latency_s for one in after), abs_tol=1e-12)
    assert math.isclose(totals.nbytes, sum(one.step_bytes for one in after))
    assert totals.flops == sum(COST.step_flops(one.context - one.tokens, 1 + one.proposed) for one in after)
    assert totals.accepted + totals.steps == totals.tokens


@settings(max_examples=25)
@given(st.lists(STEPS, min_size=1, max_size=3), MACHINES)
def test_metrics_of_any_steps_of_several_sequences_agree(
    streams: list[list[tuple[float, int, int, int]]], machine: Machine
) -> None:
    metrics = fed(machine)
    ids = tuple(range(1, 1 + len(streams)))
    metrics.begin_batch(ids)
    for number, (generation, steps) in enumerate(zip(ids, streams, strict=True)):
        states = dict.fromkeys(ids, "decode") | {generation: "preempted"}
        if steps:
            metrics.take([delta(generation, "x", tuple(records(steps)))])
        metrics.take(
            [
                BatchStatus(states, 9 * number, float(number), (), 0, 0, 0, None)  # type: ignore[arg-type]
            ]
        )
    check(metrics)
    rows = [one for steps in streams for one in records(steps) if one.index]
    totals = metrics.totals
    assert math.isclose(totals.steps, sum(1 / one.batch for one in rows), abs_tol=1e-9)
    assert math.isclose(totals.seconds, math.fsum(one.latency_s / one.batch for one in rows), abs_tol=1e-9)
    assert totals.records == len(rows)


def test_an_answer_in_a_batch_has_its_own_speed() -> None:
    """Each step's time is the answer's own, however many sequences share the pass; all of a batch share it."""
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.submitted()
    steps = [replace(record(n, 20 + n, batch=2), latency_s=0.01) for n in range(50)]
    metrics.take([delta_of(steps)])
    assert metrics.rate_average == pytest.approx(100)
    assert metrics.rate_now == pytest.approx(100)
    metrics.begin_batch([1, 2])
    for generation in (1, 2):
        metrics.take([delta(generation, "x", steps, ttft_s=0.2)])
    totals = metrics.totals
    assert (totals.steps, totals.tokens, totals.seconds) == pytest.approx((49, 98, 0.49))
