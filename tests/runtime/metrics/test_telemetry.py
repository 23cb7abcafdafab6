"""Quantiles of step times, and times of a step by rank."""

import pytest

from headrace.runtime.metrics.telemetry import quantile, rank_times


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.25, 1.75), (0.5, 3.0), (0.9, 8.2), (1.0, 10.0)])
def test_quantiles_are_interpolated_between_the_two_nearest(q: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 4.0, 10.0], q) == pytest.approx(expected)


def test_the_quantiles_of_one_value_are_that_value() -> None:
    assert [quantile([3.0], q) for q in (0.0, 0.5, 1.0)] == [3.0, 3.0, 3.0]


def test_wait_and_link_time_of_tensor_parallel_ranks() -> None:
    fast, slow = rank_times(1.0, [0.2, 0.7], staged=False)
    assert (fast.compute_s, fast.wait_s, fast.collective_s) == pytest.approx((0.2, 0.5, 0.3))
    assert (slow.compute_s, slow.wait_s, slow.collective_s) == pytest.approx((0.7, 0.0, 0.3))


def test_wait_and_link_time_of_pipeline_ranks() -> None:
    first, last = rank_times(1.0, [0.2, 0.7], staged=True)
    assert (first.wait_s, last.wait_s, last.collective_s) == pytest.approx((0.7, 0.2, 0.1))
    assert sum(rank.compute_s for rank in rank_times(0.5, [0.2, 0.8], staged=True)) == pytest.approx(0.5)
    assert rank_times(0.5, [0.0, 0.0], staged=False)[0].collective_s == 0.5
