"""The four meters of the decode view: their places in every width, and the whole of each figure."""

import pytest
from msgspec.structs import replace

from headrace.app.engine.events import Failed
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.metrics.facts import CacheFill, facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.metrics.units import percent, three_digits
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, record

NAMES = ["speed", "step", "cache", "memory"]
LONG_NAMES = ["speed", "typical step", "K/V cache", "memory reads"]


def started() -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.machine = replace(metrics.machine, measured_gb_s=16.9, memory_gb_s=None, compute_flops=None)
    metrics.submitted()
    return metrics


def drawn(metrics: LiveMetrics, width: int) -> list[str]:
    return [line.plain for line in MeterLines(metrics).lines(metrics, width, MeterLines.HEIGHT)]


@pytest.mark.parametrize("width", [34, 36, 52, 68, 76, 116, 196])
def test_meters_keep_their_places_during_an_answer(width: int) -> None:
    metrics = started()
    places = set()
    for index in range(40):
        metrics.take([delta_of([replace(record(index, 20 + index), latency_s=0.06 + 0.01 * (index % 4))])])
        lines = drawn(metrics, width)
        names = LONG_NAMES if width >= 74 else NAMES
        assert [line.startswith(f"{name} ") for line, name in zip(lines, names, strict=False)] == [True] * 4
        assert all(len(line) <= width for line in lines)
        if index > 1:
            places.add(
                (lines[0].index("tok/s"), lines[1].index("ms p50"), lines[0].index(" of "), lines[3].index("GB/s"))
            )
    assert len(places) == 1


@pytest.mark.parametrize("width", [36, 76])
def test_each_meter_names_its_maximum(width: int) -> None:
    metrics = started()
    metrics.take([delta_of([replace(record(index, 20 + index), latency_s=0.0625) for index in range(40)])])
    speed, step, cache, memory, last = drawn(metrics, width)
    assert "16.0 tok/s" in speed
    most = metrics.figures.roofline_rate
    assert most is not None
    the = "the " if width == 76 else ""
    assert percent(16 / most) + f" of {the}{most:.0f}" in speed
    assert "62.5 ms p50" in step
    assert f"{percent(metrics.fill.used_bytes / metrics.model.kv_bytes_at_limit)} of " in cache
    assert f"{percent(metrics.mbu)} of {the}16.9" in memory
    assert ("39 steps" in step) == step.endswith(" ms") == (width == 76)
    assert "of a step is not reading" in last


@pytest.mark.parametrize("width", [36, 76])
def test_mbu_stays_a_percentage_while_other_programs_run(width: int) -> None:
    metrics = started()
    metrics.take([delta_of([replace(record(index, 20 + index), latency_s=0.0625) for index in range(40)])])
    share = percent(metrics.mbu)
    for _ in range(2):
        metrics.set_load(MachineLoad(2, 2.0, 0.3, 1 << 30, 2 << 30, 0, busiest="pip"))
    lines = drawn(metrics, width)
    assert metrics.mbu is None
    assert share in lines[3]
    assert ("(busy: other programs)" if width == 76 else "(busy)") in lines[3]
    assert "Other programs use 1.7 of 2 cores." in lines[4]


@pytest.mark.parametrize("width", [36, 76])
def test_speeds_above_a_peak_are_no_percentage(width: int) -> None:
    """A peak that was measured while other programs ran is too low."""
    metrics = started()
    metrics.take([delta_of([replace(record(index, 20 + index), latency_s=0.0025) for index in range(40)])])
    assert metrics.mbu is not None
    assert metrics.mbu > 1.5
    speed, _, _, memory, last = drawn(metrics, width)
    peak = metrics.figures.roofline_rate
    assert peak is not None
    above = "above the measured peak of" if width == 76 else "above"
    assert f"{above} {three_digits(peak)}" in speed
    assert f"{above} 16.9" in memory
    assert "%" not in speed + memory
    assert "Above the measured peak." in last


def test_the_cache_of_an_idle_server_is_empty() -> None:
    metrics = started()
    metrics.begin_batch((), 4)
    metrics.answers.kv_room_bytes = 1 << 30
    cache = drawn(metrics, 76)[2]
    assert "empty" in cache
    assert "room for 1.00 GiB" in cache
    assert "%" not in cache


def test_the_cache_meter_returns_to_the_conversation_after_parallel_answers() -> None:
    metrics = started()
    metrics.fill = CacheFill(tokens=60, used_bytes=1 << 20, allocated_bytes=2 << 20)
    metrics.begin_batch((1, 2))
    metrics.answers.kv_room_bytes = 1 << 30
    assert "room for 1.00 GiB" in drawn(metrics, 76)[2]
    for number in (1, 2):
        metrics.take([Failed(number, "stopped", None)])
    assert metrics.answers.over
    assert "60 of 512 tokens" in drawn(metrics, 76)[2]
