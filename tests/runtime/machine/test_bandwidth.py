"""Bandwidth calibration, and its cache file in any state."""

import json
import queue
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.runtime.machine import bandwidth, hardware, peaks
from headrace.runtime.machine.hardware import PowerState
from headrace.runtime.ops import native


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    # What a pass is made of, not how well it is timed: two passes over a small array do.
    monkeypatch.setattr(bandwidth, "_MIN_PASSES", 2)
    # The CPU may be slow at 4 bits.
    monkeypatch.setattr(bandwidth, "_LEAST_ON_GPU", 1 << 16)
    monkeypatch.setattr(bandwidth, "_MOST_ON_GPU", 1 << 16)
    return tmp_path / "cache" / "bandwidth.json"


def test_the_bandwidth_peak_is_measured_once_and_stored(home: Path) -> None:
    assert peaks.cached_peak() is None
    done: list[float] = []
    peak = bandwidth.measure_peak(done.append)
    assert peak == peaks.cached_peak()
    assert 0 < peak.median <= peak.bytes_per_second <= peak.best
    assert peak.passes == 2
    assert done[-1] == 1.0
    assert list(home.parent.iterdir()) == [home]  # nothing half-written is left


def test_a_peak_slowed_by_other_programs_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use = SimpleNamespace(contended=True)
    monkeypatch.setattr(bandwidth, "CPUMeter", lambda: SimpleNamespace(use=lambda: use))
    slowed = bandwidth.known_peak()
    assert slowed.busy
    first = len(peaks.measurements())
    bandwidth.known_peak()
    assert len(peaks.measurements()) == first  # a minute has not passed
    monkeypatch.setattr(bandwidth, "_AGAIN_S", -60.0)
    bandwidth.known_peak()
    second = len(peaks.measurements())
    assert second > first
    use.contended = False
    assert not bandwidth.measure_peak().busy
    peaks.store(replace(slowed, bytes_per_second=9e13, busy=False))
    before = peaks.measurements()
    assert bandwidth.known_peak().bytes_per_second == 9e13
    assert peaks.measurements() == before


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(True, marks=pytest.mark.skipif(not native.status().available, reason="needs the native kernels")),
        False,
    ],
)
def test_each_thread_reads_a_separate_share_of_memory(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(native, "status", lambda: native.NativeStatus(False, "not built here"))
    host = replace(hardware.machine(), backend="cpu", usable_cores=3)
    fastest = bandwidth.measure_peak(host=host)
    measured = {peak.method: peak for peak in peaks.measurements(host)}
    assert fastest == max(measured.values(), key=lambda peak: peak.bytes_per_second)
    assert set(measured) == {"memcmp, 3 threads", *(["8 streams in each of 3 threads"] if kernels else [])}
    for peak in measured.values():
        assert 0 < peak.pass_bytes <= 8 << 20
        assert peak.pass_bytes % (3 * 2 * 4096) == 0


@pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
@pytest.mark.parametrize(("fastest", "other"), [(bandwidth._memcmp_reader, 1), (bandwidth._native_reader, 0)])
def test_later_measurements_use_the_fastest_reader(fastest: Any, other: int) -> None:
    host = replace(hardware.machine(), backend="cpu", usable_cores=2)
    assert bandwidth._best_readers(host) == [bandwidth._memcmp_reader, bandwidth._native_reader]
    bandwidth.measure_peak(host=host)
    for index, peak in enumerate(peaks.measurements(host)):
        peaks.store(replace(peak, bytes_per_second=1e9 if index == other else 9e12), host)
    assert bandwidth._best_readers(host) == [fastest]
    before = len(peaks.measurements(host))
    assert bandwidth.measure_now("run", host).source == "run"
    assert len(peaks.measurements(host)) == before + 1
    with bandwidth.streaming_reader(host) as reader:
        assert reader.method == peaks.measurements(host)[-1].method


def test_the_first_reading_of_a_machine_measures_it() -> None:
    host = replace(hardware.machine(), backend="cpu", usable_cores=2)
    with bandwidth.streaming_reader(host) as reader:
        assert reader.one_pass() > 0
    assert bool(peaks.measurements(host)) is native.status().available  # else there is no choice to make


def test_an_interrupted_pass_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    put = queue.SimpleQueue.put

    class Interrupted(queue.SimpleQueue):  # type: ignore[type-arg]
        orders = 0

        def put(self, item: Any) -> None:
            if item is True:
                Interrupted.orders += 1
                if Interrupted.orders == 2:
                    raise KeyboardInterrupt
            put(self, item)

    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    host = replace(hardware.machine(), backend="cpu", usable_cores=2)
    before = set(threading.enumerate())
    readers: set[threading.Thread] = set()

    def interrupted() -> None:
        with bandwidth._memcmp_reader(host) as reader:
            readers.update(set(threading.enumerate()) - before)
            reader.one_pass()  # one of two threads is at the barrier now

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(readers) == 2
    for thread in readers:
        thread.join()


def test_a_gpu_is_measured_by_operations_of_mlx() -> None:
    host = replace(hardware.machine(), backend="metal", device_memory_bytes=1 << 30)
    peak = bandwidth.measure_peak(host=host)
    assert peak.method in ("mx.sum float32", "4-bit matrix by vector")
    assert 7 << 13 < peak.pass_bytes <= 8 << 13
    assert peaks.cached_peak(host) == peak


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("power", "kept"),
    [
        (PowerState(None, None, None, None), True),  # nothing known speaks against it
        (PowerState(True, 50, False, False, "nominal"), True),
        (PowerState(True, 50, True, False, "nominal"), False),
        (PowerState(False, 50, False, False, "moderate"), False),
        (PowerState(False, 50, False, True, None), False),
    ],
)
def test_a_throttled_mac_stores_no_peak(power: PowerState, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "power_state", lambda: power)
    host = replace(hardware.machine(), backend="metal", device_memory_bytes=1 << 30)
    assert bandwidth.measure_peak(host=host).bytes_per_second > 0
    assert (peaks.cached_peak(host) is not None) is kept


def test_peaks_are_stored_per_machine() -> None:
    bandwidth.measure_peak()
    other = replace(hardware.machine(), device_name="another machine")
    assert peaks.cached_peak(other) is None
    bandwidth.measure_peak(host=other)
    assert peaks.cached_peak() is not None
    assert peaks.cached_peak(other) is not None


def test_measurements_of_older_formats_are_dropped(home: Path) -> None:
    """Format 2 had the native reader alone, which other load slows down most."""
    peak = bandwidth.measure_peak()
    stored = json.loads(home.read_text())
    (key, entries) = next(iter(stored["peaks"].items()))
    older = f"{key.rpartition(' / ')[0]} / 2"
    home.write_text(json.dumps({"peaks": {older: entries}}))
    assert peaks.cached_peak() is None
    peaks.store(peak)
    assert peaks.cached_peak() == peak
    assert list(json.loads(home.read_text())["peaks"]) == [key]


def test_an_unwritable_folder_is_no_error(home: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    assert bandwidth.measure_peak().bytes_per_second > 0
    assert peaks.cached_peak() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON.map(json.dumps) | st.text())
def test_a_broken_cache_file_reads_as_never_measured(home: Path, content: str) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text(content, encoding="utf-8", errors="replace")
    assert peaks.cached_peak() is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes_per_second", 0),
        ("bytes_per_second", float("nan")),
        ("median", -1.0),
        ("best", float("inf")),
        ("best", "fast"),
        ("median", None),
        ("measured_at", 7),
    ],
)
def test_an_invalid_entry_reads_as_never_measured(home: Path, field: str, value: object) -> None:
    bandwidth.measure_peak()
    stored = json.loads(home.read_text())
    for entry in next(iter(stored["peaks"].values())):
        entry[field] = value
    home.write_text(json.dumps(stored))
    assert peaks.cached_peak() is None
    assert bandwidth.measure_peak() == peaks.cached_peak()


@pytest.mark.parametrize(
    ("minutes", "busy", "source", "again"),
    [
        (5, False, "run", False),
        (5, True, "run", True),
        (0, True, "run", False),
        (90, False, "run", True),
        (5, False, "decode", True),
    ],
)
def test_memory_bandwidth_is_measured_at_most_once_an_hour(
    minutes: int, busy: bool, source: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    when = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime(peaks.TIME)
    kept = replace(peaks.summarise([9e9], pass_bytes=1, method="memcmp", source=source, busy=busy), measured_at=when)
    peaks.store(kept)
    measured = replace(kept, bytes_per_second=8e9)
    monkeypatch.setattr(bandwidth, "measure_now", lambda *_: measured)
    assert bandwidth.read_hourly("run") == (measured if again else kept)
