"""The peak is the best recent measurement; old ones expire, faster decode corrects it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.runtime.machine import hardware, peaks
from headrace.runtime.machine.peaks import Peak


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))


def measured(gb_s: float, days_ago: float = 0, source: str = "bench") -> Peak:
    peak = peaks.summarise([gb_s * 1e9], pass_bytes=1 << 28, method="memcmp", source=source)
    at = datetime.now(UTC) - timedelta(days=days_ago)
    return replace(peak, measured_at=at.strftime("%Y-%m-%dT%H:%M:%SZ"))


def known() -> float | None:
    peak = peaks.cached_peak()
    return round(peak.gb_s, 3) if peak else None


def test_slow_measurements_do_not_lower_the_peak() -> None:
    assert known() is None
    for gb_s, expected in ((14, 14), (32, 32), (15, 32)):
        peaks.store(measured(gb_s))
        assert known() == expected


def test_old_measurements_count_only_without_newer_ones() -> None:
    peaks.store(measured(60, days_ago=peaks.RECENT_DAYS + 1))
    assert known() == 60
    peaks.store(measured(30))
    assert known() == 30
    assert len(peaks.measurements()) == 1  # and is forgotten then


def test_the_file_is_bounded_and_keeps_the_fastest_and_the_newest() -> None:
    peaks.store(measured(50, days_ago=2))
    for _ in range(2 * peaks.KEPT):
        peaks.store(measured(20, days_ago=1))
    peaks.store(measured(10))
    kept = peaks.measurements()
    assert len(kept) == peaks.KEPT
    assert known() == 50
    assert round(kept[-1].gb_s) == 10


def test_a_measurement_has_its_circumstances() -> None:
    peak = peaks.summarise([1e9, 2e9, 3e9, 4e9], pass_bytes=7, method="memcmp", source="chat")
    assert (peak.bytes_per_second, peak.median, peak.best, peak.passes) == (4e9, 2.5e9, 4e9, 4)
    assert peak.source == "chat"
    assert peak.load is not None


def test_decode_that_beats_the_peak_corrects_it() -> None:
    enough = {"step_bytes": peaks.STEP_BYTES, "steps": peaks.STEPS + 1}
    assert peaks.correct_peak(99.0, **enough) is None  # nothing to correct
    peaks.store(measured(14))
    assert peaks.correct_peak(None, **enough) is None
    assert peaks.correct_peak(13.0, **enough) is None
    assert peaks.correct_peak(40.0, step_bytes=peaks.STEP_BYTES - 1, steps=100) is None  # may come from a cache
    assert peaks.correct_peak(40.0, step_bytes=peaks.STEP_BYTES, steps=3) is None  # may be a late look at the clock
    assert known() == 14
    corrected = peaks.correct_peak(38.5, **enough)
    assert corrected is not None
    assert corrected.source == "decode"
    assert known() == 38.5


def test_rates_above_the_nominal_bandwidth_do_not_count() -> None:
    host = replace(hardware.machine(), backend="metal", device_name="Apple M4")
    assert host.nominal_bandwidth is not None
    peaks.store(measured(50), host)
    too_fast = host.nominal_bandwidth / 1e9 * 1.2
    assert peaks.correct_peak(too_fast, step_bytes=peaks.STEP_BYTES, steps=100, host=host) is None


def test_peaks_in_the_first_file_format_read_as_never_measured(tmp_path: Path) -> None:
    peaks.store(measured(20))
    file = tmp_path / "cache" / "bandwidth.json"
    file.write_text(file.read_text().replace("[", "").replace("]", ""))
    assert known() is None
