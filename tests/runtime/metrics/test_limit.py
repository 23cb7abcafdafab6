"""The limit of a step by memory and arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.metrics.limit import step_limit

POSITIVE = st.floats(1.0, 1e15)


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE)
def test_the_longer_of_reading_and_computing_is_the_limit(
    nbytes: float, flops: float, bytes_per_second: float, flops_per_second: float
) -> None:
    limit = step_limit(nbytes, flops, bytes_per_second, flops_per_second)
    reading_s = nbytes / bytes_per_second
    computing_s = flops / flops_per_second
    assert limit.seconds == max(reading_s, computing_s)
    assert limit.roof == ("arithmetic" if computing_s > reading_s else "memory")


@given(POSITIVE, POSITIVE, POSITIVE)
def test_unknown_flops_do_not_limit_a_step(nbytes: float, flops: float, bytes_per_second: float) -> None:
    limit = step_limit(nbytes, flops, bytes_per_second)
    assert (limit.seconds, limit.roof) == (nbytes / bytes_per_second, "memory")
