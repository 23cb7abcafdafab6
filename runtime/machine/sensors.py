"""Power, temperature and GPU load sensors that need no root.

- Linux: CPU temperature (hwmon) and power (RAPL, usually readable by root only).
- NVIDIA GPUs: NVML, through `nvidia-ml-py` (the `cuda` extra).
- Apple silicon: power from IOReport, through `zeus-apple-silicon`; temperature and GPU load have no maintained library.

Unknown readings are None. A sensor that failed once is not read again.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.runtime.machine.hardware import ReadFile, read_file

_HWMON, _RAPL = Path("/sys/class/hwmon"), Path("/sys/class/powercap/intel-rapl:0/energy_uj")
_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")  # best first


@dataclass(frozen=True, slots=True)
class Readings:
    """One reading of all sensors. Shares from 0 to 1, sizes in bytes."""

    power_w: float | None = None
    temperature_c: float | None = None
    gpu_share: float | None = None
    gpu_memory_used: int | None = None
    gpu_memory_total: int | None = None


Sensors = Callable[[], Readings]


def sensors(backend: str, clock: Callable[[], float] = time.monotonic) -> Sensors:
    """Return the sensors of this machine. backend: of `Machine`. Takes milliseconds; a reading well under one."""
    if backend == "cuda" and (found := _attempt(lambda: _nvidia(importlib.import_module("pynvml")))) is not None:
        return _until_it_fails(found)
    if sys.platform == "darwin":
        found = _attempt(lambda: apple(importlib.import_module("zeus_apple_silicon").AppleEnergyMonitor(), clock))
        return _until_it_fails(found) if found is not None else Readings
    return linux(_HWMON, _RAPL, clock)


def linux(hwmon: Path, rapl: Path, clock: Callable[[], float], read: ReadFile = read_file) -> Sensors:
    """Return sensors for the hottest CPU temperature and, if readable, power from the energy counter."""
    thermometers = _thermometers(hwmon, read)
    power = _Rate(clock)

    def look() -> Readings:
        celsius = [int(text) / 1e3 for path in thermometers if (text := read(str(path)).strip()).lstrip("-").isdigit()]
        joules = int(text) / 1e6 if (text := read(str(rapl)).strip()).isdigit() else None
        return Readings(power_w=power.of(joules), temperature_c=max(celsius, default=None))

    return look


def apple(monitor: Any, clock: Callable[[], float]) -> Sensors:
    """Return sensors for the power of CPU, GPU and memory. monitor: a `zeus_apple_silicon.AppleEnergyMonitor`."""
    power = _Rate(clock)

    def look() -> Readings:
        energy = monitor.get_cumulative_energy()
        parts = [energy.cpu_total_mj, energy.gpu_mj, energy.dram_mj]
        known = [part for part in parts if part is not None]
        return Readings(power_w=power.of(sum(known) / 1e3 if known else None))

    return look


def _nvidia(nvml: Any) -> Sensors:
    """Return sensors of the first visible GPU, which MLX uses."""
    nvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    device = (
        nvml.nvmlDeviceGetHandleByIndex(int(visible)) if visible.isdigit() else nvml.nvmlDeviceGetHandleByUUID(visible)
    )

    def look() -> Readings:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        return Readings(
            power_w=nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            temperature_c=float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            gpu_share=nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            gpu_memory_used=int(memory.used),
            gpu_memory_total=int(memory.total),
        )

    return look


class _Rate:
    """Power from an energy counter."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # time, joules

    def of(self, joules: float | None) -> float | None:
        """Return watts since the last call; None at the first, and after a counter reset."""
        now, last = self._clock(), self._last
        self._last = (now, joules) if joules is not None else None
        if joules is None or last is None or joules < last[1] or now <= last[0]:
            return None
        return (joules - last[1]) / (now - last[0])


def _thermometers(hwmon: Path, read: ReadFile) -> list[Path]:
    """Return the temperature inputs of the best chip."""
    chips = {read(str(folder / "name")).strip(): folder for folder in sorted(hwmon.glob("hwmon*"))}
    best = next((chips[name] for name in _CPU_CHIPS if name in chips), None)
    return sorted(best.glob("temp*_input")) if best is not None else []


def _attempt(make: Callable[[], Sensors]) -> Sensors | None:
    """Return None if a library is missing or finds no device; error types vary."""
    try:
        return make()
    except Exception:
        return None


def _until_it_fails(look: Sensors) -> Sensors:
    """Return empty readings from the first failure on."""
    works = [True]

    def guarded() -> Readings:
        if works[0]:
            try:
                return look()
            except Exception:
                works[0] = False
        return Readings()

    return guarded
