"""All surfaces of the chat name the same limit of decoding."""

from dataclasses import replace

import pytest

from headrace.app.answer.sentence import sentence
from headrace.app.tui.decode.context_speed import expected_rate
from headrace.app.tui.metrics.feed import facts
from headrace.app.tui.metrics.figures import decode_point, roofs
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.model_rows import model_rows
from tests.app.scripted_engine import CARD, COST, record, summary

READING_S = COST.step_bytes(0) / 54e9


@pytest.mark.parametrize(
    ("compute_flops", "roof"),
    [
        (None, "memory"),
        (100 * COST.step_flops(0) / READING_S, "memory"),
        (COST.step_flops(0) / READING_S / 2, "arithmetic"),
    ],
)
@pytest.mark.usefixtures("home")
def test_all_surfaces_have_the_same_limit(compute_flops: float | None, roof: str) -> None:
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
    card = replace(CARD, name="smollm2-135m")
    row = next(row for row in model_rows(card, machine) if row.name == card.name)
    assert row.tokens_per_second == pytest.approx(most)

    metrics.submitted()
    metrics.stepped([replace(record(n, 1 + n), latency_s=0.1) for n in range(20)])
    metrics.finished(summary(1, 0, 20), "stop")
    assert metrics.figures.limit is not None
    assert metrics.figures.limit.roof == roof
    assert metrics.figures.roofline_rate == pytest.approx(most, rel=0.01)
    assert metrics.roofline_rate == pytest.approx(most, rel=0.01)
    point = decode_point(metrics.totals)
    assert point is not None
    assert roofs(machine).limit_of(point).startswith(f"{roof} limits it")
