"""The speed that runs are compared by: of a decode the median step's, which a few stalled steps cannot move."""

from statistics import median

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample


def typical_speed(test: Test, sample: Sample) -> float:
    """Tokens per second of the typical step for a decode test, of the whole test otherwise."""
    if test.kind == "decode":
        return test.batch / median(sample.latencies_s)
    return sample.tokens_per_second(test)
