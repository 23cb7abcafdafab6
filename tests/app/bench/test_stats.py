"""The statistics against answers that are known: textbook tables, closed forms and simulation."""

import random
from statistics import NormalDist, fmean

import pytest

from headrace.app.bench.compare import difference, holm
from headrace.app.bench.stats import bootstrap, geometric_ratio, sd, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (10, 2.2281), (30, 2.0423)]
)
def test_student_quantiles_are_those_of_the_table(df: int, t: float) -> None:
    assert student_quantile(0.975, df) == pytest.approx(t, abs=1e-4)
    assert student_cdf(t, df) == pytest.approx(0.975, abs=1e-5)
    assert student_cdf(-t, df) == pytest.approx(0.025, abs=1e-5)


def test_student_quantiles_approach_the_normal_distributions() -> None:
    assert student_quantile(0.975, 100_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [5, 10, 40])
def test_bootstrap_intervals_have_their_nominal_coverage(size: int) -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(200):
        low, high = bootstrap([draw.gauss(100, 3) for _ in range(size)], fmean, resamples=300)
        hits += low <= 100 <= high
    assert 0.87 <= hits / 200 <= 0.99  # of five values 91 % by longer simulation; plain percentiles cover 82 %


def test_the_bootstrap_is_repeatable_and_contains_its_statistic() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 5.0]
    assert bootstrap(values, fmean) == bootstrap(values, fmean)
    low, high = bootstrap(values, fmean)
    assert min(values) <= low <= fmean(values) <= high <= max(values)
    assert bootstrap([2.0], fmean) == bootstrap([], fmean) == (None, None)


def test_paired_ratios_cancel_common_noise() -> None:
    draw = random.Random(3)
    shared = [draw.uniform(50, 150) for _ in range(8)]
    ratio, (low, high) = geometric_ratio([1.2 * value for value in shared], shared)
    assert ratio == pytest.approx(1.2)
    assert (low, high) == pytest.approx((1.2, 1.2))


def test_sd_of_one_value_is_zero() -> None:
    assert sd([1.0]) == 0.0
    assert sd([1.0, 2.0, 4.0]) == pytest.approx(1.5275, abs=1e-4)  # n - 1 below the sum


def test_a_difference_explained_by_memory_speed_is_not_reported() -> None:
    draw = random.Random(5)

    def run(memory: float) -> list[tuple[float, float | None]]:
        speeds = [memory * draw.gauss(1, 0.05) for _ in range(20)]
        return [(speed * draw.gauss(1, 0.002), speed) for speed in speeds]

    found = difference(run(45), run(60))
    assert found is not None
    assert found.slope == pytest.approx(1, abs=0.02)
    assert found.low < 1 < found.high


def test_without_memory_speeds_the_difference_is_tested_by_student() -> None:
    """Against the two-sample t test worked by hand: equal sizes, pooled variance, on logarithms."""
    import math

    a = [math.exp(v) for v in (1.0, 1.1, 0.9, 1.05)]
    b = [math.exp(v) for v in (1.3, 1.2, 1.25, 1.4)]
    found = difference([(value, None) for value in a], [(value, None) for value in b])
    assert found is not None
    assert found.ratio == pytest.approx(math.exp(1.2875 - 1.0125))
    error = math.sqrt((0.021875 + 0.021875) / 6 * (1 / 4 + 1 / 4))
    t = (1.2875 - 1.0125) / error
    assert found.p == pytest.approx(2 * (1 - student_cdf(t, 6)))
    assert found.low == pytest.approx(math.exp(0.275 - student_quantile(0.975, 6) * error))


def test_too_few_or_identical_repetitions_show_no_difference() -> None:
    assert difference([(1.0, None)], [(1.0, None)] * 5) is None
    same = difference([(2.0, 1.0)] * 3, [(2.0, 1.0)] * 3)
    assert same is not None
    assert (same.ratio, same.p) == (1.0, 1.0)


def test_holm_corrects_for_several_tests() -> None:
    assert holm([0.01, 0.04, 0.03]) == [True, False, False]
    assert holm([0.01, 0.02, 0.03]) == [True, True, True]
    assert holm([]) == []
