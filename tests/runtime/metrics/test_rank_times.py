"""Times of a step by rank."""

import pytest

from headrace.runtime.metrics.telemetry import rank_times


def test_the_slowest_rank_waits_for_none_and_all_share_the_link() -> None:
    fast, slow = rank_times(1.0, [0.2, 0.7], staged=False)
    assert (fast.compute_s, fast.wait_s, fast.collective_s) == pytest.approx((0.2, 0.5, 0.3))
    assert (slow.compute_s, slow.wait_s, slow.collective_s) == pytest.approx((0.7, 0.0, 0.3))


def test_stages_wait_for_each_other_and_no_time_exceeds_the_step() -> None:
    first, last = rank_times(1.0, [0.2, 0.7], staged=True)
    assert (first.wait_s, last.wait_s, last.collective_s) == pytest.approx((0.7, 0.2, 0.1))
    assert sum(rank.compute_s for rank in rank_times(0.5, [0.2, 0.8], staged=True)) == pytest.approx(0.5)
    assert rank_times(0.5, [0.0, 0.0], staged=False)[0].collective_s == 0.5
