"""Energy, power, temperature and GPU load sensors that need no root.

- Linux: CPU temperature (hwmon) and energy (RAPL, usually readable by root only).
- NVIDIA GPUs: NVML, through `nvidia-ml-py` (the `cuda` extra).
- Apple silicon: energy from IOReport, GPU load from the I/O registry (`runtime.machine.darwin`).

Unknown readings are None. A library that failed once is not called again, while files are tried at each reading.

A new source is a function that returns `Sensors`, called in `sensors`; `LoadSampler` and `EnergyMeter` read them.
tests/runtime/machine/test_sensors.py has recorded files and libraries of its own.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from msgspec import Struct

from headrace.runtime.config import environment
from headrace.runtime.machine import darwin
from headrace.runtime.machine.hardware import ReadFile, read_file

_HWMON = Path("/sys/class/hwmon")
_RAPL = Path("/sys/class/powercap")
_CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")  # best first


class Readings(Struct, frozen=True):
    """One reading of all sensors; None where there is no sensor. Sizes in bytes.

    power_w: the mean since the reading before; on NVIDIA GPUs, NVML's own reading.
    temperature_c: of the hottest CPU core, or the GPU.
    gpu_share: part of the time that the GPU worked, 0 to 1.
    gpu_memory_used, gpu_memory_total: by all programs.
    joules: a counter that grows from any start and may begin anew.
    energy_parts: the parts of the machine that it covers.
    """

    power_w: float | None = None
    temperature_c: float | None = None
    gpu_share: float | None = None
    gpu_memory_used: int | None = None
    gpu_memory_total: int | None = None
    joules: float | None = None
    energy_parts: str = ""


Sensors = Callable[[], Readings]
_Made = TypeVar("_Made")


def sensors(backend: str, clock: Callable[[], float] = time.monotonic) -> Sensors:
    """Return the sensors of this machine, none with HEADRACE_SENSORS=0. backend: of `Machine`.

    Takes milliseconds; a reading takes well under one.
    """
    if not environment.sensors():
        return Readings
    if backend == "cuda":
        nvidia = _attempt(lambda: _nvidia(importlib.import_module("pynvml")))
        if nvidia is not None:
            return _until_it_fails(nvidia)
    if sys.platform == "darwin":
        return apple(clock)
    return linux(_HWMON, _RAPL, clock)


def linux(hwmon: Path, rapl: Path, clock: Callable[[], float], read: ReadFile = read_file) -> Sensors:
    """Return sensors for the hottest CPU temperature and, if readable, the energy of CPU packages and memory.

    hwmon, rapl: folders of the system's thermometers and energy counters.
    clock: seconds, for power.
    read: returns a file's text; "" if it cannot be read.
    """
    # Files are looked for once; a reading reads them.
    thermometers = _thermometers(hwmon, read)
    counters = _rapl_counters(rapl, read)
    power = _Rate(clock)
    kinds = {kind for kind, _ in counters}
    parts = "CPU and memory" if "dram" in kinds else "CPU"

    def read_all() -> Readings:
        temperatures = [read(str(path)).strip() for path in thermometers]
        celsius = [int(text) / 1e3 for text in temperatures if text.lstrip("-").isdigit()]
        microjoules = [read(str(path)).strip() for _, path in counters]
        joules = None
        if microjoules and all(text.isdigit() for text in microjoules):
            joules = sum(map(int, microjoules)) / 1e6
        return Readings(
            power_w=power.watts(joules), temperature_c=max(celsius, default=None), joules=joules, energy_parts=parts
        )

    return read_all


def apple(clock: Callable[[], float], paths: darwin.Libraries = darwin.LIBRARIES) -> Sensors:
    """Return sensors for the energy of the chip and its memory, and for the load and memory of the GPU."""
    core = _attempt(lambda: darwin.CoreFoundation(paths.core_foundation))
    counters: darwin.EnergyCounters | None = None
    statistics: darwin.GPUStatistics | None = None
    if core is not None:
        counters = _attempt(lambda: darwin.EnergyCounters(core, paths.io_report))
        statistics = _attempt(lambda: darwin.GPUStatistics(core, paths.io_kit))
    power = _Rate(clock)

    def read_all() -> Readings:
        joules = None
        share = None
        used = None
        if counters is not None:
            joules = counters.joules()
        if statistics is not None:
            share, used = statistics.read()
        return Readings(
            power_w=power.watts(joules),
            gpu_share=share,
            gpu_memory_used=used,
            joules=joules,
            energy_parts="CPU, GPU, neural engine and memory",
        )

    return _until_it_fails(read_all)


def _nvidia(nvml: ModuleType) -> Sensors:
    """Return sensors of the first visible GPU, which MLX uses. Energy counters begin with Volta."""
    nvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if visible.isdigit():
        device = nvml.nvmlDeviceGetHandleByIndex(int(visible))
    else:
        device = nvml.nvmlDeviceGetHandleByUUID(visible)
    counts = _attempt(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device)) is not None

    def read_all() -> Readings:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        joules = None
        if counts:
            joules = nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
        return Readings(
            power_w=nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            temperature_c=float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            gpu_share=nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            gpu_memory_used=int(memory.used),
            gpu_memory_total=int(memory.total),
            joules=joules,
            energy_parts="GPU",
        )

    return read_all


class _Rate:
    """Power from an energy counter."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # time, joules

    def watts(self, joules: float | None) -> float | None:
        """Return the mean power since the last call; None at the first, and after the counter began anew.

        joules: the counter now; None if it cannot be read.
        """
        now = self._clock()
        last = self._last
        self._last = None
        if joules is not None:
            self._last = (now, joules)
        if joules is None or last is None:
            return None
        before, joules_before = last
        if joules < joules_before or now <= before:
            return None
        return (joules - joules_before) / (now - before)


def _thermometers(hwmon: Path, read: ReadFile) -> list[Path]:
    """Return the temperature inputs of all chips with the best name: each CPU socket has a chip."""
    folders: dict[str, list[Path]] = {}
    for folder in sorted(hwmon.glob("hwmon*")):
        folders.setdefault(read(str(folder / "name")).strip(), []).append(folder)
    best = next((folders[name] for name in _CPU_CHIPS if name in folders), [])
    return [path for folder in best for path in sorted(folder.glob("temp*_input"))]


def _rapl_counters(rapl: Path, read: ReadFile) -> list[tuple[str, Path]]:
    """Return (kind, file) of the energy counters of packages and of memory beside them. `psys` would count twice."""
    named = [(read(str(zone / "name")).strip().partition("-")[0], zone) for zone in sorted(rapl.glob("intel-rapl:*"))]
    return [(kind, zone / "energy_uj") for kind, zone in named if kind in ("package", "dram")]


def _attempt(make: Callable[[], _Made]) -> _Made | None:
    """Return None if a library is missing or finds no device; error types vary."""
    try:
        return make()
    except Exception:
        return None


def _until_it_fails(read: Sensors) -> Sensors:
    """Return empty readings from the first failure on."""
    works = True

    def guarded() -> Readings:
        nonlocal works
        if works:
            try:
                return read()
            except Exception:
                works = False
        return Readings()

    return guarded
