"""Hardware facts of this machine, from MLX, procfs, cgroups and macOS tools.

`machine()` is cheap (a few procfs reads, no process) and cached. Facts that change (free memory, power) or need a
process (GPU cores on macOS) have functions of their own. Unknown facts are None. Parsers: `hardware_text`.

`limit_command_buffers` sets a limit of MLX for Metal, by an environment variable that MLX reads when it makes its
device (tests/runtime/machine/test_command_buffers.py).

Readers of files and tools are parameters, so tests put recorded machines in their place: folders under
tests/runtime/machine/machines/ with the files and outputs of tools (test_hardware.py). A new fact is a field of
`Machine` or a function here, and a parser there.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import astuple

from headrace.runtime.machine import hardware_text as text
from headrace.runtime.machine.chips import Chip, find
from headrace.runtime.machine.darwin import notify_state

Backend = Literal["metal", "cuda", "cpu"]
ReadFile = Callable[[str], str]
"""Returns the contents of a file, or an empty string."""
RunTool = Callable[..., str]
"""Returns the standard output of a command, or an empty string."""


class Machine(Struct, frozen=True, dict=True):
    """Hardware facts that matter for decoding. Sizes in bytes."""

    backend: Backend
    device_name: str
    architecture: str
    """GPU or CPU family as MLX names it: `applegpu_g16s`, `sm_90`, `x86_64`."""
    memory_bytes: int | None
    """Main memory for this process: RAM, or the container's limit if lower."""
    device_memory_bytes: int | None
    """Metal: recommended working set. CUDA: the card's memory. CPU: None."""
    os: str
    cpu: str
    physical_cores: int
    usable_cores: int
    """Physical cores for this process, within its affinity and the container's CPU limit."""
    isa: frozenset[str]
    """Instruction-set flags as Linux names them (`avx512f`, `asimd`); empty elsewhere."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the cached properties: another process does not look them up again."""
        return Machine, astuple(self), self.__dict__  # a Struct's fields, and what `cached_property` has stored

    @cached_property
    def gpu_cores(self) -> int | None:
        """Cores of an Apple GPU, None elsewhere. Runs `ioreg` once (tens of milliseconds)."""
        if self.backend != "metal":
            return None
        return ask_gpu_cores(run_tool)

    @cached_property
    def chip(self) -> Chip | None:
        """The device's row of the chip table; None if there is none (all CPUs)."""
        return find(self.device_name, self.gpu_cores, self.device_memory_bytes or self.memory_bytes)

    @property
    def nominal_bandwidth(self) -> float | None:
        """The vendor's memory bandwidth in bytes per second."""
        if self.chip is None:
            return None
        return self.chip.bandwidth


@lru_cache(maxsize=1)
def machine() -> Machine:
    """Return the machine of this process."""
    import mlx.core as mx

    limit_command_buffers()
    backend: Backend = "cpu"
    if mx.default_device().type == mx.gpu:
        backend = "metal" if mx.metal.is_available() else "cuda"
    return assemble(backend, mx.device_info(mx.default_device()), read_file, os.uname(), _scheduled_cpus())


def assemble(
    backend: Backend,
    device: Mapping[str, str | int],
    read: ReadFile,
    uname: os.uname_result,
    scheduled_cpus: int,
) -> Machine:
    """Return a `Machine` from what the system tells.

    backend: of MLX.
    device: MLX's `device_info`.
    read: returns a file's text; "" if it cannot be read.
    uname: of the system.
    scheduled_cpus: number of CPUs in the affinity mask.
    """
    cpu = text.cpuinfo(read("/proc/cpuinfo"))
    # Apple silicon has no cpuinfo and no hyper-threads: every scheduled CPU is a core.
    cores = cpu.physical_cores or scheduled_cpus
    device_name = str(device.get("device_name") or cpu.model or uname.machine)
    system = uname.sysname
    cpu_name = cpu.model or uname.machine
    if uname.sysname == "Darwin":  # the chip is CPU and GPU
        system = "macOS, Darwin"
        cpu_name = cpu.model or device_name
    ram = text.meminfo(read("/proc/meminfo")).get("MemTotal") or _size(device, "memory_size")
    device_memory = None
    if backend == "metal":
        device_memory = _size(device, "max_recommended_working_set_size")
    elif backend == "cuda":
        device_memory = _size(device, "total_memory")
    else:
        device_name = cpu.model or device_name
    return Machine(
        backend=backend,
        device_name=device_name,
        architecture=str(device.get("architecture") or uname.machine),
        memory_bytes=_least([ram or _ram_from_sysconf(), *(limit for limit, _ in cgroup_memory(read))]),
        device_memory_bytes=device_memory,
        os=f"{system} {uname.release} {uname.machine}",
        cpu=cpu_name,
        physical_cores=cores,
        usable_cores=max(1, min(cores, scheduled_cpus, math.ceil(cgroup_cpus(read) or cores))),
        isa=cpu.flags,
    )


def memory_available(read: ReadFile | None = None, run: RunTool | None = None) -> int | None:
    """Return the bytes this process could allocate without swapping or reaching its container's limit."""
    read = read or read_file
    run = run or run_tool
    free = text.meminfo(read("/proc/meminfo")).get("MemAvailable")
    if free is None:
        free = text.vm_stat_available(run("vm_stat"))
    return _least([free, *(max(0, limit - used) for limit, used in cgroup_memory(read))])


def swap_used(read: ReadFile | None = None, run: RunTool | None = None) -> int | None:
    """Return the swap in use, in bytes."""
    memory = text.meminfo((read or read_file)("/proc/meminfo"))
    if "SwapTotal" in memory and "SwapFree" in memory:
        return memory["SwapTotal"] - memory["SwapFree"]
    return text.swap_used((run or run_tool)("sysctl", "vm.swapusage"))


class PowerState(Struct, frozen=True):
    """Power and thermal state of a Mac; unknown fields are None (all of them on Linux)."""

    on_battery: bool | None
    battery_percent: int | None
    low_power_mode: bool | None
    throttled: bool | None
    """Thermal throttling as the system reports it."""
    thermal_pressure: text.ThermalPressure | None = None

    @property
    def slows_memory(self) -> bool:
        """True if measurements may be below the machine's normal speed."""
        return bool(self.low_power_mode or self.throttled or self.thermal_pressure in ("moderate", "heavy"))


def power_state(run: RunTool | None = None, state: Callable[[str], int | None] = notify_state) -> PowerState:
    """Return power source, battery, low-power mode and thermal state, from pmset and a notification's state."""
    run = run or run_tool
    source = text.power(run("pmset", "-g", "batt"))
    pressure = text.thermal_pressure(state("com.apple.system.thermalpressurelevel"))
    throttled = text.speed_limited(run("pmset", "-g", "therm"))
    if pressure is not None and not throttled:
        throttled = pressure == "heavy"
    return PowerState(
        on_battery=source.on_battery,
        battery_percent=source.battery_percent,
        low_power_mode=text.low_power_mode(run("pmset", "-g")),
        throttled=throttled,
        thermal_pressure=pressure,
    )


def sysctl_facts(run: RunTool | None = None) -> dict[str, str]:
    """Return macOS version, chip, core kinds and Rosetta translation of this process; empty elsewhere."""
    names = ("kern.osproductversion", "machdep.cpu.brand_string", "sysctl.proc_translated")
    cores = [f"hw.perflevel{level}.{fact}" for level in (0, 1) for fact in ("physicalcpu", "name")]
    return text.sysctl((run or run_tool)("sysctl", *names, *cores))


def ask_gpu_cores(run: RunTool) -> int | None:
    """Return the GPU cores of a Mac from the I/O registry, else from the slower system report."""
    cores = text.ioreg_gpu_cores(run("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"))
    if cores is None:
        cores = text.system_profiler_gpu_cores(run("system_profiler", "SPDisplaysDataType", "-json"))
    return cores


def cgroup_memory(read: ReadFile) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use) of every memory limit above this process, cgroup v2 and v1.

    Droppable page cache (`inactive_file`) does not count as in use.
    """
    unified, legacy = text.cgroup_paths(read("/proc/self/cgroup"), "memory")
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    trees = (("/sys/fs/cgroup", unified, v2), ("/sys/fs/cgroup/memory", legacy, v1))
    for root, path, (limit_file, used_file, cache) in trees:
        for folder in _upwards(root, path):
            limit = text.cgroup_bytes(read(f"{folder}/{limit_file}"))
            if limit is not None:
                used = text.cgroup_bytes(read(f"{folder}/{used_file}")) or 0
                droppable = text.cgroup_stat(read(f"{folder}/memory.stat"), cache) or 0
                yield limit, max(0, used - droppable)


def cgroup_cpus(read: ReadFile) -> float | None:
    """Return the CPUs granted to this container, None without a limit."""
    unified, legacy = text.cgroup_paths(read("/proc/self/cgroup"), "cpu")
    granted = [text.cgroup_cpus(read(f"{folder}/cpu.max")) for folder in _upwards("/sys/fs/cgroup", unified)]
    for folder in _upwards("/sys/fs/cgroup/cpu", legacy):
        quota = read(f"{folder}/cpu.cfs_quota_us")
        period = read(f"{folder}/cpu.cfs_period_us")
        granted.append(text.cgroup_cpus(f"{quota.strip()} {period.strip()}"))
    return min((cpus for cpus in granted if cpus is not None), default=None)


def read_file(path: str) -> str:
    """Return the contents of a small file, an empty string if it is missing or unreadable."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def run_tool(*command: str) -> str:
    """Return the standard output of a system tool, an empty string if it is missing, fails to start or hangs."""
    import subprocess  # deferred: most commands start no system tool

    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _upwards(root: str, path: str | None) -> Iterator[str]:
    """Yield the folder of a cgroup and all above it. Containers often see their own group as the root."""
    if path is None:
        return
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield "/".join([root, *parts[:depth]])


def _size(device: Mapping[str, str | int], key: str) -> int | None:
    """Return a size of MLX's device_info; None if it is unknown or 0."""
    value = device.get(key)
    if not isinstance(value, int) or value <= 0:
        return None
    return value


def _least(sizes: list[int | None]) -> int | None:
    """Return the least known size; None if none is known."""
    return min((size for size in sizes if size is not None), default=None)


def _ram_from_sysconf() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _scheduled_cpus() -> int:
    """Return the CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    if affinity is None:
        return os.cpu_count() or 1
    return len(affinity(0))


# --- limits of MLX that have to be set before it makes its device ----------------------------------------------

COMMAND_BUFFER_VARIABLE = "MLX_MAX_OPS_PER_BUFFER"  # kernels in a Metal command buffer, at most
_MAX_KERNELS = 40  # MLX's limit on most chips
_MIN_KERNELS = 8  # bounds the number of submissions
_LAYER_KERNELS = 11  # kernels of a layer, at least
_ASSUMED_LAYERS = 16  # layers of a model that is not known yet
_BUFFERS = 12  # ten in flight, the open one, and one more


def kernels_per_buffer(layers: int) -> int:
    """Return the kernels of a Metal command buffer for a model of so many layers.

    A step is encoded while the one before runs. MLX copies a layer's K/V buffers whole if they are written while a
    command buffer that reads them is unfinished. Ten command buffers may be in flight, so that none of the step before
    reads a layer's K/V any more where the ten hold less than a step. MLX's own limit, 40 or 50 kernels, is too high for
    models of few layers. The limit is computed, not measured (`tests.bench.metal_simulator`).
    """
    return max(_MIN_KERNELS, min(_MAX_KERNELS, layers * _LAYER_KERNELS // _BUFFERS))


def limit_command_buffers(layers: int = _ASSUMED_LAYERS) -> None:
    """Set MLX's environment variable on a Mac, unless it is set. Does nothing once MLX has made its device.

    Asking MLX about its device makes it, so `machine()` and loading call this first. Without a model the limit is one
    for few layers.
    """
    if sys.platform == "darwin":
        os.environ.setdefault(COMMAND_BUFFER_VARIABLE, str(kernels_per_buffer(layers)))
