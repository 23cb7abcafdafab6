"""Memory bandwidth during a benchmark, from short streaming reads between measurements.

Bandwidth of a shared machine varies by a third within seconds, so a peak of another moment makes MBU meaningless. The
run's peak is the upper quartile of all passes, as in `runtime.machine.peaks.summarise`. `BenchSession` calls `read`
before and after each repetition.

Guard: tests/app/bench/measure/test_memory_speed.py.
"""

from statistics import median

from headrace.app.bench.measure.records import MeasuredPeak
from headrace.runtime.machine.bandwidth import Reader
from headrace.runtime.machine.peaks import Peak, summarise

PASSES = 6  # of one call of `read`


class MemorySpeed:
    """Streaming reads on demand, with the rate of every pass."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._rates: list[float] = []  # GB/s of every pass of the run

    def read(self) -> float:
        """Read memory and return the median rate of the passes, in GB/s."""
        rates = [self._reader.pass_bytes / self._reader.one_pass() / 1e9 for _ in range(PASSES)]
        self._rates += rates
        return median(rates)

    @property
    def peak_gb_s(self) -> float | None:
        """Upper quartile of all passes so far, in GB/s."""
        if self._rates:
            return _upper_quartile(sorted(self._rates))
        return None

    def measurement(self) -> Peak | None:
        """Return all passes as one measurement for the peak cache."""
        rates = [rate * 1e9 for rate in self._rates]  # `summarise` takes bytes per second
        if not rates:
            return None
        return summarise(rates, pass_bytes=self._reader.pass_bytes, method=self._reader.method, source="bench")

    def spread(self) -> MeasuredPeak | None:
        """Return the spread of the passes."""
        if not self._rates:
            return None
        ordered = sorted(self._rates)
        low = ordered[len(ordered) // 20]
        high = ordered[-1 - len(ordered) // 20]
        return MeasuredPeak(
            upper_quartile=_upper_quartile(ordered),
            median=median(ordered),
            p5=low,
            p95=high,
            passes=len(ordered),
            method=self._reader.method,
        )


def _upper_quartile(ordered: list[float]) -> float:
    return ordered[len(ordered) * 3 // 4]  # the same index as in `summarise`
