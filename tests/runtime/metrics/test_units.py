"""Sizes in binary units, rates in decimal units, three digits at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.metrics.units import format_bytes, format_rate, format_seconds


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1.00 KiB"),
        (98_362_432, "93.8 MiB"),
        (25_276_510_208, "23.5 GiB"),
        (137_438_953_472, "128 GiB"),
    ],
)
def test_memory_is_binary(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(54e9, "54.0 GB/s"), (999.7e9, "1.00 TB/s"), (4.8e12, "4.80 TB/s"), (12, "12 B/s")],
)
def test_bandwidth_is_decimal(rate: float, expected: str) -> None:
    assert format_rate(rate) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0042, "4.2 ms"),
        (0.09994, "99.9 ms"),
        (0.09996, "100 ms"),
        (0.42, "420 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (61.0, "61.00 s"),
    ],
)
def test_durations_have_the_unit_of_their_size(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@given(st.floats(0, 1e17))
def test_at_most_three_digits(value: float) -> None:
    for formatted in (format_bytes(value), format_rate(min(value, 9e14))):
        number = formatted.split()[0]
        assert float(number) < 1000
        assert len(number.replace(".", "")) <= 3 or formatted.endswith(" B")
