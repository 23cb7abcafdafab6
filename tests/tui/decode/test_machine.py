"""The machine beside the model: what its section says, and the plain line when others take what decoding needs."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.app.engine.events import Prefill
from headrace.app.tui.decode.machine import MachineSection, contention_text
from headrace.app.tui.metrics.facts import MachineFacts, ModelFacts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.machine_watch import SAMPLE_S, MachineWatch
from headrace.app.tui.screens.compare_screen import CompareScreen
from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.machine.sensors import Readings
from headrace.runtime.metrics.telemetry import RankTimes
from tests.support.deltas import delta_of
from tests.support.scripted_engine import record
from tests.tui.conftest import Driver

QUIET = MachineLoad(2, 1.9, 1.85, 2 << 30, 8 << 30, 0, Readings(23.4, 61.0))
CROWDED = MachineLoad(2, 2.0, 1.1, 2 << 30, 8 << 30, 0, Readings(), busiest="cc1plus\x1b[31m")


def _lines(load: MachineLoad, samples: int, width: int = 50, height: int = 6) -> list[str]:
    metrics = LiveMetrics()
    for _ in range(samples):
        metrics.set_load(load)
    return [line.plain for line in MachineSection(metrics).lines(metrics, width, height)]


def test_load_memory_swap_power_and_temperature_are_shown() -> None:
    lines = _lines(QUIET, 3)
    assert lines[0].startswith("CPU  █")
    assert lines[0].endswith(" 1.9 + 0.0 others of 2") or lines[0].endswith(" 1.9 + 0.1 others of 2")
    assert lines[1].endswith(" 2.00 GiB of 8.00 GiB")
    assert lines[2] == "swap 0 B · 23.4 W · 61 °C"
    gpu = MachineLoad(8, 1.0, 1.0, 2 << 30, 8 << 30, 0, Readings(310.0, 61.0, 0.87, 2 << 30, 80 << 30))
    assert _lines(gpu, 1)[1].endswith(" 87 %, 2.00 GiB of 80.0 GiB")
    mac = MachineLoad(8, 1.0, 1.0, 2 << 30, 8 << 30, 0, Readings(gpu_share=0.5, gpu_memory_used=6 << 30))
    assert _lines(mac, 1)[1].endswith(" 50 %, 6.00 GiB")


def _spent(joules: float, seconds: float = 2.0) -> MachineLoad:
    return MachineLoad(2, 1.0, 1.0, 2 << 30, 8 << 30, 0, Readings(12.0), energy=EnergyUse(joules, seconds, "CPU"))


def _facts(metrics: LiveMetrics) -> str:
    return [line.plain for line in MachineSection(metrics).lines(metrics, 50, 6)][2]


def test_energy_of_a_token_is_net_of_the_least_idle_power() -> None:
    metrics = LiveMetrics()
    metrics.ready(ModelFacts(), MachineFacts())
    metrics.set_load(_spent(99.0))  # of loading
    metrics.set_load(_spent(5.0))
    metrics.set_load(_spent(4.0))  # 2 W
    metrics.set_load(_spent(40.0))  # something else ran
    metrics.submitted()
    metrics.take([Prefill(1, 5, 5, 0)])
    metrics.take([delta_of([record(index, 20 + index, 1) for index in range(10)])])
    metrics.set_load(_spent(30.0))  # also of the prompt
    assert metrics.energy.joules_per_token is None
    assert _facts(metrics) == "swap 0 B · 12.0 W"
    metrics.take([delta_of([record(index, 20 + index, 1) for index in range(10, 30)])])
    metrics.set_load(_spent(24.0))
    metrics.take([delta_of([record(index, 20 + index, 1) for index in range(30, 40)])])
    kept = metrics.frozen()
    metrics.set_load(_spent(19.0))
    assert kept.energy.joules_per_token == pytest.approx((24.0 - 2 * 2.0) / 20)
    assert metrics.energy.joules_per_token == pytest.approx((24.0 + 19.0 - 4 * 2.0) / 30)
    assert _facts(metrics) == "swap 0 B · 12.0 W · 1.17 J/token"
    metrics.submitted()
    assert metrics.energy.joules_per_token is None
    assert metrics.energy.idle_watts == 2.0


def test_without_a_counter_or_idle_power_there_is_no_energy_of_a_token() -> None:
    for load in (QUIET, _spent(30.0)):
        metrics = LiveMetrics()
        metrics.ready(ModelFacts(), MachineFacts())
        metrics.take([delta_of([record(index, 20 + index, 1) for index in range(10)])])
        for _ in range(3):
            metrics.take([delta_of([record(index, 20 + index, 1) for index in range(10)])])
            metrics.set_load(load)
        assert metrics.energy.joules_per_token is None
        assert "token" not in _facts(metrics)


def test_unknown_figures_are_left_out() -> None:
    lines = _lines(CROWDED, 1)
    assert lines[-1] == "swap 0 B"
    metrics = LiveMetrics()
    assert MachineSection(metrics).lines(metrics, 50, 6)[0].plain == "–"


def test_a_model_on_several_machines_has_a_line_per_rank() -> None:
    metrics = LiveMetrics()
    metrics.ready(ModelFacts(name="m", ranks=("rank 0 (a): 67 % of each layer", "rank 1 (b): 33 %")), MachineFacts())
    lines = [line.plain for line in MachineSection(metrics).lines(metrics, 50, 6)]
    assert lines[:2] == ["rank 0 (a) 67 % of each layer", "rank 1 (b) 33 %"]
    metrics.answer.records.append(replace(record(0, 5), ranks=(RankTimes(2e-3, 1e-3, 5e-4), RankTimes(3e-3, 0, 5e-4))))
    lines = [line.plain for line in MachineSection(metrics).lines(metrics, 60, 6)]
    assert lines[0] == "rank 0 (a) 2.0 + 1.0 waiting + 0.5 ms · 67 % of each layer"
    for _ in range(2):
        metrics.set_load(CROWDED)
    lines = [line.plain for line in MachineSection(metrics).lines(metrics, 60, 6)]
    assert [line.split()[0] for line in lines[:5]] == ["CPU", "rank", "rank", "CPU", "RAM"]
    assert metrics.figures.ranks == 2


def test_own_and_other_load_have_different_symbols() -> None:
    line = _lines(CROWDED, 1)[0]
    assert "█▒" in line
    assert len(line) == 50


def test_one_sample_is_not_reported_as_load() -> None:
    assert not any("CPU busy" in line for line in _lines(CROWDED, 1))
    assert _lines(CROWDED, 2, 70)[0].startswith("CPU busy: other programs use 0.9 of 2 cores (mostly cc1plus")
    assert _lines(CROWDED, 2, 45)[0] == "CPU busy: other programs use 0.9 of 2 cores"
    assert _lines(CROWDED, 2, 33)[0] == "CPU busy: others use 0.9 of 2"
    assert "\x1b" not in contention_text(CROWDED)
    metrics = LiveMetrics()
    for load in (CROWDED, CROWDED, QUIET):
        metrics.set_load(load)
    assert metrics.contention is None


def test_no_line_is_wider_than_the_section() -> None:
    for width in range(12, 60):
        assert all(len(line) <= max(width, 12) for line in _lines(CROWDED, 2, width))


class Watch(MachineWatch):
    """Sees what a test says."""

    def __init__(self, loads: Sequence[MachineLoad]) -> None:
        super().__init__(list)
        self.loads = list(loads)

    def sample_if_due(self, now: float) -> MachineLoad | None:  # noqa: ARG002
        return self.loads.pop(0) if self.loads else None


def test_the_chat_reports_the_load_of_other_programs(play) -> None:
    async def scenario(it: Driver) -> None:
        it.app.poller.watch = Watch([CROWDED, CROWDED])
        await it.until(lambda: "CPU busy: other programs use 0.9 of 2 cores (mostly cc1plus" in it.text())
        it.app.poller.watch = Watch([QUIET])
        await it.until(lambda: "CPU busy" not in it.text())

    play(scenario, size=(90, 24))


def test_a_comparison_reports_other_load_too(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.write("/compare temperature=1.2")
        await it.until(lambda: isinstance(it.app.screen, CompareScreen))
        it.app.poller.watch = Watch([CROWDED, CROWDED])
        await it.until(lambda: "CPU busy: other programs use 0.9 of 2 cores" in it.text())
        it.app.poller.watch = Watch([QUIET])
        await it.until(lambda: "CPU busy" not in it.text())

    play(scenario)


def test_samples_are_taken_every_two_seconds_once_there_is_a_model() -> None:
    watch = MachineWatch(list)
    assert watch.sample_if_due(0.0) is None
    watch._sampler = sampler = _Sampler()  # type: ignore[assignment]
    for now in (10.0, 10.5, 11.9, 12.0, 12.1, 10.0 + 2 * SAMPLE_S):
        watch.sample_if_due(now)
    assert sampler.samples == 3
    sampler.fails = True
    assert watch.sample_if_due(100.0) is None
    assert watch.sample_if_due(200.0) is None
    assert sampler.samples == 4


class _Sampler:
    samples = 0
    fails = False

    def sample(self, _own: Sequence[int]) -> MachineLoad:
        self.samples += 1
        if self.fails:
            raise PermissionError
        return QUIET
