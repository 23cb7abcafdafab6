"""All surfaces of the chat name the same limit of decoding."""

import pytest
from msgspec.structs import replace

from headrace.app.answer.sentence import sentence
from headrace.app.engine.events import Done
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.prediction import TargetMachine, predict
from headrace.app.tui.decode.context_speed import expected_rate
from headrace.app.tui.metrics.facts import facts, with_peaks
from headrace.app.tui.metrics.figures import decode_point, roofs
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.models_screen import model_rows
from headrace.models.registry.catalog import load_catalog
from headrace.runtime.engine.request import Finished
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, COST, record, summary

READING_S = COST.step_bytes(0) / 54e9


def answer(metrics: LiveMetrics, **figures: float) -> None:
    """Add an answer of 20 tokens, a tenth of a second each, that has ended. figures: of its summary."""
    metrics.submitted()
    metrics.take([delta_of([replace(record(n, 1 + n), latency_s=0.1) for n in range(20)])])
    metrics.take([Done(1, Finished("stop", replace(summary(1, 0, 20), **figures)))])


@pytest.mark.parametrize(
    ("compute_flops", "roof"),
    [
        (None, "memory"),
        (100 * COST.step_flops(0) / READING_S, "memory"),
        (COST.step_flops(0) / READING_S / 2, "arithmetic"),
    ],
)
@pytest.mark.usefixtures("home")
def test_panel_meters_and_sentence_have_the_same_speed_limit(compute_flops: float | None, roof: str) -> None:
    metrics = LiveMetrics()
    model, machine = facts(CARD)
    machine = replace(machine, measured_gb_s=54.0, memory_gb_s=20.0, compute_flops=compute_flops, peak_flops=None)
    metrics.ready(model, machine)
    limit = metrics.figures.limit
    assert limit is not None
    assert limit.roof == roof
    assert limit.seconds == READING_S * (2 if roof == "arithmetic" else 1)
    most = 1 / limit.seconds
    assert ("GFLOP" in sentence(metrics.figures)) == (roof == "arithmetic")
    assert expected_rate(COST, 54.0, 0, machine.flops_per_second) == pytest.approx(most)

    answer(metrics)
    assert metrics.figures.limit is not None
    assert metrics.figures.limit.roof == roof
    assert metrics.figures.roofline_rate == pytest.approx(most, rel=0.01)
    point = decode_point(metrics.totals)
    assert point is not None
    assert roofs(machine).limit_of(point).startswith(f"{roof} limits it")


@pytest.mark.parametrize("loaded", ["no such model", "smollm2-135m"])
@pytest.mark.usefixtures("home")
def test_the_model_picker_and_fit_predict_the_same_speed(loaded: str) -> None:
    """Both predict each model of the catalog from its facts, with the same number of tokens in the cache."""
    card = replace(CARD, name=loaded)
    _, machine = facts(CARD)
    machine = replace(machine, measured_gb_s=54.0, compute_flops=2e12)
    target = TargetMachine("this machine", 54e9, None, flops=2e12, apple=False)
    rows = {row.name: row.tokens_per_second for row in model_rows(card, machine)}
    for name, entry in load_catalog().items():
        predicted = predict(entry.step_shape, target, min(DEFAULT_CONTEXT, entry.context - 1))
        assert rows[name] == pytest.approx(predicted.roofline)


def test_a_later_measurement_leaves_the_figures_of_an_answer_as_they_are() -> None:
    metrics = LiveMetrics()
    model, machine = facts(CARD)
    metrics.ready(model, replace(machine, measured_gb_s=54.0, memory_gb_s=None, compute_flops=None, peak_flops=None))
    answer(metrics)

    def figures() -> list[object]:
        return [metrics.figures.roofline_rate, metrics.mbu, metrics.memory, metrics.limits]

    before = figures()
    metrics.machine = with_peaks(metrics.machine, 80.0, None, 30.0)
    metrics.version += 1
    assert figures() == before
    metrics.submitted()
    metrics.take([delta_of([replace(record(n, 1 + n), latency_s=0.1) for n in range(20)])])
    assert metrics.limits.measured_gb_s == 80.0


def test_an_answer_above_the_measured_bandwidth_corrects_its_limit() -> None:
    """The engine stores its MBU as that of the corrected bandwidth, which it tells at the next measurement only."""
    metrics = LiveMetrics()
    model, machine = facts(CARD)
    metrics.ready(model, replace(machine, measured_gb_s=20.0, memory_gb_s=None, compute_flops=None, peak_flops=None))
    answer(metrics, achieved_gb_s=25.0, mbu=1.0)
    assert metrics.limits.measured_gb_s == 25.0
