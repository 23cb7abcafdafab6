"""Quantiles of step times."""

import pytest

from headrace.runtime.metrics.telemetry import quantile


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.25, 1.75), (0.5, 3.0), (0.9, 8.2), (1.0, 10.0)])
def test_quantiles_are_interpolated_between_the_two_nearest(q: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 4.0, 10.0], q) == pytest.approx(expected)


def test_the_quantiles_of_one_value_are_that_value() -> None:
    assert [quantile([3.0], q) for q in (0.0, 0.5, 1.0)] == [3.0, 3.0, 3.0]
