"""Rates of streaming reads during a benchmark: median of a call, peak and spread of all."""

import pytest

from headrace.app.bench.measure.memory_speed import PASSES, MemorySpeed
from headrace.runtime.machine.bandwidth import Reader

COUNT = 5 * PASSES  # 30


def test_the_peak_and_the_spread_are_those_of_all_passes() -> None:
    seconds = iter([1 / rate for rate in range(1, COUNT + 1)])  # of passes that reach 1, 2, 3, ... GB/s
    speed = MemorySpeed(Reader(lambda: next(seconds), 10**9, "counted"))
    assert speed.peak_gb_s is speed.spread() is speed.measurement() is None

    assert speed.read() == pytest.approx((1 + PASSES) / 2)  # the median of this call
    for _ in range(4):
        speed.read()

    spread = speed.spread()
    measurement = speed.measurement()
    assert spread is not None
    assert measurement is not None
    assert (spread.p5, spread.median, spread.upper_quartile, spread.p95) == pytest.approx((2, 15.5, 23, 29))
    assert spread.passes == COUNT
    assert speed.peak_gb_s == pytest.approx(23)
    assert measurement.bytes_per_second == pytest.approx(23e9)
    assert (measurement.source, measurement.pass_bytes) == ("bench", 10**9)
    assert measurement.method == spread.method == "counted"
