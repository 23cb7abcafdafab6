"""Every figure of a test, on timelines with known answers."""

import math
import random

import pytest
from msgspec.structs import replace

from headrace.app.bench.measure.document import points_of
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.records import Latencies, Result
from headrace.app.bench.measure.result import drift, result
from headrace.app.bench.measure.sample import Repetition, Sample, typical_speed
from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.bench.show.columns import mbu_cell
from headrace.app.bench.show.phrases import energy_cell
from headrace.app.predict.step_cost_fit import Point, fit_step_cost
from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.machine_load import CPUUse
from headrace.runtime.metrics.units import format_joules


def entry(test: Test, *samples: Sample, memory: float | None = 50.0, peak: float | None = 50.0) -> Result:
    repetitions = [Repetition(sample, float(i), memory) for i, sample in enumerate(samples)]
    return result(test, repetitions, setup=EngineSetup("headrace", "m"), peak_gb_s=peak, nominal_gb_s=100.0)


def _energetic(latencies: list[float], prompt_s: float = 0.0, joules: float | None = None) -> Sample:
    use = EnergyUse(joules, sum(latencies) + prompt_s, "CPU") if joules is not None else None
    return Sample(prompt_s, 0.0, latencies, energy=use)


@pytest.mark.parametrize(
    ("test", "latencies", "prompt_s", "tokens"),
    [
        (Test(0, 5), [0.1] * 4, 0.0, 4),
        (Test(0, 5, batch=3), [0.1] * 4, 0.0, 12),
        (Test(100, 0), [], 2.0, 100),
        (Test(100, 5), [0.1] * 4, 2.0, 105),
    ],
)
def test_energy_is_of_the_tokens_that_the_speed_counts(
    test: Test, latencies: list[float], prompt_s: float, tokens: int
) -> None:
    samples = [_energetic(latencies, prompt_s, joules) for joules in (30.0, 40.0, None)]  # the last was too short
    repetitions = [Repetition(sample, 0.0, None) for sample in samples]
    setup = EngineSetup("headrace", "m")
    found = result(test, repetitions, setup=setup, peak_gb_s=None, nominal_gb_s=None, idle=5.0)
    energy = found.energy_per_token
    seconds = 2 * (sum(latencies) + prompt_s)
    assert energy.whole_joules == pytest.approx(70.0 / 2 / tokens)
    assert energy.joules == pytest.approx((70.0 - 5.0 * seconds) / 2 / tokens)
    assert (energy.watts, energy.idle_watts, energy.parts) == (pytest.approx(70.0 / seconds), 5.0, "CPU")
    assert energy_cell(found) == format_joules(energy.joules)
    unknown = result(test, repetitions[2:], setup=setup, peak_gb_s=None, nominal_gb_s=None, idle=5.0)
    assert unknown.energy_per_token is None
    assert energy_cell(unknown) == ""


def decode(latencies: list[float], weights: float = 90e6, kv: float = 10e6) -> Sample:
    return Sample(0.0, 0.5, latencies, weights, kv, 300e6, 1000)


def test_decode_speed_is_the_inverse_of_tpot() -> None:
    found = entry(Test(0, 5), decode([0.01, 0.02, 0.03, 0.04]))
    assert found.tokens_per_second.mean == pytest.approx(4 / 0.1)
    assert found.ttft_ms is None  # a decode starts from a cache that is full already


def test_the_median_lies_in_its_interval_on_a_machine_that_stalls() -> None:
    """The interval of the mean often leaves it out: a stall in one of five rounds pulls the mean down alone."""
    draw = random.Random(5)
    for _ in range(50):
        samples = [decode([draw.choice([0.01, 0.01, 0.01, 0.1]) + 0.001 * draw.random()] * 4) for _ in range(5)]
        repetitions = [Repetition(sample, 0.0, None) for sample in samples]
        speed = result(Test(0, 5), repetitions, setup=EngineSetup("headrace", "m"), peak_gb_s=None, nominal_gb_s=None)
        found = speed.tokens_per_second
        assert found.low <= found.median <= found.high


def test_prefill_speed_is_the_prompt_over_ttft() -> None:
    found = entry(Test(512, 0), Sample(0.9, 0.124, []))
    assert found.tokens_per_second.mean == pytest.approx(500)
    assert found.ttft_ms.median == pytest.approx(1024)
    assert found.itl_ms == Latencies()
    assert found.mbu is None
    assert found.roofline_tokens_per_second is None


def test_prompt_and_generation_is_all_tokens_over_all_time() -> None:
    found = entry(Test(100, 3), Sample(0.4, 0.1, [0.25, 0.25], 1.0, 1.0, 1.0))
    assert found.tokens_per_second.mean == pytest.approx(103 / 1.0)


def test_itl_percentiles_are_over_all_steps_of_all_repetitions() -> None:
    found = entry(Test(0, 51), decode([i / 1000 for i in range(1, 51)]), decode([i / 1000 for i in range(51, 101)]))
    itl = found.itl_ms
    assert itl.p50 == pytest.approx(50.5)
    assert itl.p95 == pytest.approx(95.05)
    assert itl.p99 == pytest.approx(99.01)
    assert itl.max == pytest.approx(100)


def test_bandwidth_mbu_roofline_and_intensity() -> None:
    found = entry(Test(0, 3), decode([0.004, 0.004]))
    assert found.achieved_bandwidth_gb_s == pytest.approx(25)
    assert found.mbu == pytest.approx(0.5)
    assert found.mbu_nominal == pytest.approx(0.25)
    assert found.mbu_paired.mean == pytest.approx(0.5)
    assert found.roofline_tokens_per_second == pytest.approx(500)
    assert found.arithmetic_intensity == pytest.approx(3)
    assert found.achieved_gflop_s == pytest.approx(75)


def test_mbu_is_busy_if_half_of_the_repetitions_were() -> None:
    sample = decode([0.004, 0.004])
    calm = CPUUse(2, 2.0, 1.9)
    taken = CPUUse(2, 2.0, 1.0)

    def found(*uses: CPUUse | None) -> Result:
        repetitions = [Repetition(sample, 0.0, 50.0, use) for use in uses]
        return result(Test(0, 3), repetitions, setup=EngineSetup("headrace", "m"), peak_gb_s=50.0, nominal_gb_s=None)

    for uses in ((calm, None, taken), (None, None), (calm,)):
        entry = found(*uses)
        assert (entry.busy, entry.mbu, mbu_cell(entry)) == (False, pytest.approx(0.5), "50 %")
    for uses in ((calm, taken), (taken,)):
        entry = found(*uses)
        assert (entry.busy, entry.mbu, entry.mbu_paired, mbu_cell(entry)) == (True, None, None, "busy")
    assert [kept.other_cpus for kept in found(taken, None).repetitions] == [1.0, None]


def test_a_reading_slower_than_the_steps_counts_as_the_peak() -> None:
    found = entry(Test(0, 3), decode([0.004, 0.004]), memory=20.0)
    assert found.mbu == pytest.approx(0.5)


def test_an_mbu_above_one_has_a_note() -> None:
    found = entry(Test(0, 3), decode([0.001, 0.001]))
    assert found.mbu == pytest.approx(2)
    assert any("MBU above 1" in note for note in found.notes)
    assert not entry(Test(0, 3), decode([0.004, 0.004])).notes


def test_without_a_peak_there_is_no_mbu() -> None:
    found = entry(Test(0, 3), decode([0.004, 0.004]), memory=None, peak=None)
    assert found.achieved_bandwidth_gb_s == pytest.approx(25)
    assert found.mbu is found.roofline_tokens_per_second is found.mbu_paired is None


def test_a_peer_without_byte_counts_has_no_bandwidth() -> None:
    found = entry(Test(0, 3), Sample(0.0, 0.0, [0.01, 0.01], own_tokens_per_second=99.0))
    assert found.achieved_bandwidth_gb_s is None
    assert found.repetitions[0].own_tokens_per_second == 99.0


def test_a_stall_does_not_change_the_typical_step_time() -> None:
    calm = decode([0.01] * 9)
    stalled = decode([0.01] * 8 + [5.0])
    assert typical_speed(Test(0, 10), calm) == typical_speed(Test(0, 10), stalled) == pytest.approx(100)


def test_drift_compares_the_last_third_with_the_first() -> None:
    assert drift([100, 100, 1, 1, 110, 110]) == pytest.approx(0.1)
    assert drift([100, 50]) is None


def test_the_step_cost_fit_recovers_known_constants() -> None:
    points = [Point(str(nbytes), nbytes, 0.00226 + nbytes / 497e9) for nbytes in (2.3e9, 2.7e9, 4.5e9, 8.3e9)]
    fit = fit_step_cost(points)
    assert fit is not None
    assert fit.fixed_ms == pytest.approx(2.26)
    assert fit.effective_bandwidth_gb_s == pytest.approx(497)
    assert fit.largest_residual < 1e-9


def test_the_step_cost_model_fits_the_published_m4_max_figures() -> None:
    """mlx-lm's table for one model at seven precisions, bytes as MLX stores them (see assets/published.toml)."""
    from headrace.app.predict.published import points

    own = [p for p in points() if (p.chip, p.engine, p.model) == ("Apple M4 Max", "mlx-lm", "qwen3-4b")]
    fit = fit_step_cost([Point(p.stored_as, p.nbytes, 1 / p.tokens_per_second) for p in own])
    assert fit is not None
    assert fit.fixed_ms == pytest.approx(2.26, rel=0.1)
    assert fit.effective_bandwidth_gb_s == pytest.approx(497, rel=0.03)
    assert fit.largest_residual < 0.02


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point("a", 1e9, 1.0)],
        [Point("a", 1e9, 1.0), Point("b", 1.1e9, 2.0)],
        [Point("a", 1e9, 2.0), Point("b", 2e9, 1.0)],
        [Point("a", 1e9, 1.0), Point("b", 2e9, 3.0)],
    ],
)
def test_too_few_or_scattered_points_give_no_step_cost(points: list[Point]) -> None:
    assert fit_step_cost(points) is None


def test_only_decode_tests_of_the_engine_are_fitted() -> None:
    tests = [Test(0, 3), Test(0, 3, 512), Test(64, 0), Test(64, 3)]
    entries = [entry(test, decode([0.004, 0.004]) if test.generate else Sample(1.0, 0.1, [])) for test in tests]
    found = points_of([*entries, replace(entries[0], engine="mlx-lm")])
    assert [point.label for point in found] == ["m tg3 @ d0", "m tg3 @ d512"]
    assert all(math.isclose(point.seconds, 0.004) for point in found)


def test_a_step_cost_of_two_points_states_no_error() -> None:
    from headrace.app.bench.show.formats import step_cost_line

    fit = fit_step_cost([Point("a", 1e9, 0.01), Point("b", 2e9, 0.02)])
    assert fit is not None
    assert "2 points" in step_cost_line(fit)
    assert "%" not in step_cost_line(fit)
