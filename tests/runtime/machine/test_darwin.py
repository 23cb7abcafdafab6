"""C functions of macOS against a library that has them over objects with counted references."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runtime.machine.darwin import (
    LIBRARIES,
    CoreFoundation,
    EnergyCounters,
    GPUStatistics,
    Libraries,
    notify_state,
)
from headrace.runtime.machine.sensors import apple

SOURCE = Path(__file__).with_name("fake_darwin.c")
PRESSURE = "com.apple.system.thermalpressurelevel"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("darwin") / "fake_darwin.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", built, SOURCE], check=True)
    return str(built)


@pytest.fixture
def paths(library: str, monkeypatch: pytest.MonkeyPatch) -> Libraries:
    monkeypatch.delenv("FAKE", raising=False)
    return Libraries(library, library, library, library)


def _count(library: str, name: str) -> int:
    return ctypes.c_long.in_dll(ctypes.CDLL(library), name).value


def _call(library: str, name: str) -> int:
    return int(getattr(ctypes.CDLL(library), name)())


def test_energy_is_that_of_the_totals_in_their_units(paths: Libraries) -> None:
    counters = EnergyCounters(CoreFoundation(paths.core_foundation), paths.io_report)
    before = _count(paths.io_report, "live")
    first = counters.joules()
    second = counters.joules()
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(2 * 1.0 + 9.0 + 0.5)  # two dies, GPU, memory; no part counts twice
    assert _count(paths.io_report, "live") == before  # every sample was released


@pytest.mark.parametrize("broken", ["no-channels", "no-subscription"])
def test_a_mac_without_counters_has_none(paths: Libraries, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setenv("FAKE", broken)
    with pytest.raises(OSError, match="no energy counters"):
        EnergyCounters(CoreFoundation(paths.core_foundation), paths.io_report)


@pytest.mark.parametrize("broken", ["no-sample", "other-key", "no-array", "other-units"])
def test_a_malformed_energy_sample_gives_no_reading(
    paths: Libraries, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    counters = EnergyCounters(CoreFoundation(paths.core_foundation), paths.io_report)
    monkeypatch.setenv("FAKE", broken)
    before = _count(paths.io_report, "live")
    assert counters.joules() is None
    assert _count(paths.io_report, "live") == before


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("", (0.87, 6 << 30)),
        ("no-gpu", (None, None)),
        ("no-statistics", (None, None)),
        ("odd-statistics", (None, None)),
    ],
)
def test_load_and_memory_of_the_gpu_are_read_and_released(
    paths: Libraries, monkeypatch: pytest.MonkeyPatch, broken: str, expected: tuple[float | None, int | None]
) -> None:
    monkeypatch.setenv("FAKE", broken)
    before = _count(paths.io_kit, "live")
    assert GPUStatistics(CoreFoundation(paths.core_foundation), paths.io_kit).read() == expected
    assert _count(paths.io_kit, "live") == before
    assert _call(paths.io_kit, "open_services") == 0


@pytest.mark.parametrize(("broken", "expected"), [("", 2), ("no-notification", None), ("no-state", None)])
def test_the_state_of_a_notification_is_read_and_released(
    paths: Libraries, monkeypatch: pytest.MonkeyPatch, broken: str, expected: int | None
) -> None:
    monkeypatch.setenv("FAKE", broken)
    assert notify_state(PRESSURE, paths.system) == expected
    assert _call(paths.system, "open_tokens") == 0


def test_a_missing_mac_library_leaves_the_other_sensors(paths: Libraries, tmp_path: Path) -> None:
    seconds = iter(range(100))
    look = apple(lambda: float(next(seconds)), paths)
    assert look().power_w is None  # the first look
    found = look()
    assert (found.power_w, found.gpu_share, found.gpu_memory_used) == (pytest.approx(11.5), 0.87, 6 << 30)
    assert found.energy_parts == "CPU, GPU, neural engine and memory"
    missing = str(tmp_path / "missing.so")
    without = apple(lambda: 0.0, Libraries(paths.core_foundation, paths.io_kit, missing, paths.system))()
    assert (without.joules, without.power_w, without.gpu_share) == (None, None, 0.87)
    without = apple(lambda: 0.0, Libraries(paths.core_foundation, missing, paths.io_report, paths.system))()
    assert without.joules is not None
    assert without.gpu_share is None


@pytest.mark.skipif(sys.platform == "darwin", reason="they are there")
def test_other_systems_have_no_darwin_sensors() -> None:
    assert notify_state(PRESSURE) is None
    with pytest.raises(OSError, match="CoreFoundation"):
        CoreFoundation()
    assert apple(lambda: 0.0)().joules is None


@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_the_libraries_of_a_real_mac_are_read_without_a_crash() -> None:
    """The real libraries answer, and nothing crashes; virtual machines may lack counters and statistics."""
    core = CoreFoundation()
    with core.string("headrace") as made:
        assert core.text(made) == "headrace"
        assert core.number(made) is None
    share, used = GPUStatistics(core).read()
    assert share is None or 0 <= share <= 1
    assert used is None or used >= 0
    assert notify_state(PRESSURE) in (None, 0, 1, 2, 3, 4)
    look = apple(lambda: 0.0, LIBRARIES)
    first = look().joules
    second = look().joules
    assert (first is None) == (second is None)
    assert first is None or second is None or 0 <= first <= second
