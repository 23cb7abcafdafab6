"""Power, temperature and GPU load from recorded files and fake libraries."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runtime.machine import sensors as of
from headrace.runtime.machine.sensors import Readings, linux, sensors


class Clock:
    """A second a look."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _chip(hwmon: Path, number: int, name: str, *celsius: float) -> None:
    folder = hwmon / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    for place, value in enumerate(celsius, 1):
        (folder / f"temp{place}_input").write_text(f"{value * 1000:.0f}\n")


def _zone(rapl: Path, zone: str, name: str, microjoules: int | None) -> None:
    folder = rapl / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    if microjoules is not None:
        (folder / "energy_uj").write_text(f"{microjoules}\n")


def test_cpu_temperature_and_power_on_linux(tmp_path: Path) -> None:
    rapl = tmp_path / "powercap"
    _chip(tmp_path / "hwmon", 0, "nvme", 90.0)
    _chip(tmp_path / "hwmon", 1, "acpitz", 20.0)
    _chip(tmp_path / "hwmon", 2, "coretemp", 51.0, 63.5)
    _zone(rapl, "intel-rapl:0", "package-0", None)  # for root only
    look = linux(tmp_path / "hwmon", rapl, Clock())
    assert look() == Readings(temperature_c=63.5, energy_parts="CPU")
    _zone(rapl, "intel-rapl:0", "package-0", 1_000_000)
    assert look().power_w is None  # the first look
    _zone(rapl, "intel-rapl:0", "package-0", 24_500_000)
    assert (found := look()).power_w == pytest.approx(23.5)
    assert found.joules == pytest.approx(24.5)
    _zone(rapl, "intel-rapl:0", "package-0", 5)
    assert look().power_w is None  # the counter began anew


def test_the_hottest_core_of_all_sockets_counts(tmp_path: Path) -> None:
    _chip(tmp_path, 0, "coretemp", 51.0, 72.5)
    _chip(tmp_path, 1, "coretemp", 49.0)
    _chip(tmp_path, 2, "acpitz", 90.0)
    assert linux(tmp_path, tmp_path / "none", Clock())().temperature_c == 72.5


def test_packages_and_memory_count_once(tmp_path: Path) -> None:
    zones = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "2": "psys"}
    for place, (zone, name) in enumerate(zones.items()):
        _zone(tmp_path, f"intel-rapl:{zone}", name, 10**place * 1_000_000)
    found = linux(tmp_path / "none", tmp_path, Clock())()
    assert (found.joules, found.energy_parts) == (1 + 100 + 1000, "CPU and memory")
    (tmp_path / "intel-rapl:0:1" / "energy_uj").unlink()
    assert linux(tmp_path / "none", tmp_path, Clock())().joules is None  # a part of it would be too little


def test_no_sensors_give_no_readings(tmp_path: Path) -> None:
    assert linux(tmp_path / "none", tmp_path / "none", Clock())() == Readings(energy_parts="CPU")


def test_sensors_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    assert sensors("cuda")().power_w is not None
    monkeypatch.setenv("HEADRACE_SENSORS", "0")
    assert sensors("cuda")() == Readings()


def _nvml(**more: Any) -> Any:
    asked: list[object] = []
    return SimpleNamespace(
        asked=asked,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: asked.append(index) or index,
        nvmlDeviceGetHandleByUUID=lambda name: asked.append(name) or name,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2 << 30, total=80 << 30),
        nvmlDeviceGetPowerUsage=lambda _: 310_500,
        nvmlDeviceGetTemperature=lambda _device, _kind: 61,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=87),
        NVML_TEMPERATURE_GPU=0,
        **more,
    )


@pytest.mark.parametrize(("visible", "asked"), [(None, 0), ("2,0", 2), ("GPU-12ab", "GPU-12ab")])
def test_the_visible_gpu_is_read(monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: object) -> None:
    nvml = _nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sensors("cuda")() == Readings(310.5, 61.0, 0.87, 2 << 30, 80 << 30, energy_parts="GPU")
    assert nvml.asked == [asked]
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda _: 1_234_500
    assert sensors("cuda")().joules == pytest.approx(1234.5)


def test_a_failed_sensor_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken() -> Readings:
        calls.append(1)
        raise RuntimeError("GPU is lost")

    look = of._until_it_fails(broken)
    assert look() == look() == Readings()
    assert len(calls) == 1
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(of.darwin, "CoreFoundation", lambda _: 1 / 0)
    assert sensors("cuda")() == sensors("metal")() == Readings(energy_parts=sensors("metal")().energy_parts)
