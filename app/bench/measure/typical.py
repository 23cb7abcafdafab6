"""The speed that runs are compared by: for a decode that of the median step, robust to stalls."""

from statistics import median

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample


def typical_speed(test: Test, sample: Sample) -> float:
    """Return tokens per second of the median step for a decode test, of the whole test otherwise."""
    if test.kind == "decode":
        return test.batch / median(sample.latencies_s)
    return sample.tokens_per_second(test)
