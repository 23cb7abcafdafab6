"""Parsers of hardware facts: Linux procfs and cgroupfs, macOS sysctl, ioreg, system_profiler, pmset and vm_stat.

Parsers accept any text and never raise; facts that are not found are None or absent. `runtime.machine.hardware` gives
them the texts. tests/runtime/machine/test_hardware_text.py tries arbitrary ones, test_hardware.py those of machines.
"""

import json
import re
from typing import Literal

from msgspec import Struct

ThermalPressure = Literal["nominal", "moderate", "heavy"]

# Arm names its cores by number: MIDR implementer and part, as in Linux arch/arm64/include/asm/cputype.h.
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
}
_ARM_MAKERS = {
    0x41: "Arm",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x51: "Qualcomm",
    0x61: "Apple",
    0xC0: "Ampere",
}


class CpuInfo(Struct, frozen=True):
    """CPU model, cores without hyper-threads, and instruction-set flags of `/proc/cpuinfo`."""

    model: str | None
    physical_cores: int | None
    flags: frozenset[str]


class Power(Struct, frozen=True):
    """Power source and battery charge; None if unknown."""

    on_battery: bool | None
    battery_percent: int | None


def cpuinfo(text: str) -> CpuInfo:
    """Parse `/proc/cpuinfo` of x86 (named models, `flags`) and Arm (numbered parts, `Features`)."""
    processors = [_fields(block) for block in re.split(r"\n\s*\n", text) if "processor" in _fields(block)]
    if not processors:
        return CpuInfo(None, None, frozenset())
    first = processors[0]
    cores = {(cpu["physical id"], cpu["core id"]) for cpu in processors if "physical id" in cpu and "core id" in cpu}
    flags = first.get("flags") or first.get("Features") or ""
    return CpuInfo(
        model=first.get("model name") or _arm_model(processors),
        physical_cores=len(cores) or len(processors),
        flags=frozenset(flags.split()),
    )


def _arm_model(processors: list[dict[str, str]]) -> str | None:
    """Return the distinct cores: `Cortex-X925 + Cortex-A725`, `Apple (Arm part 0x000)`."""
    names: list[str] = []
    for cpu in processors:
        try:
            maker = int(cpu["CPU implementer"], 16)
            part = int(cpu["CPU part"], 16)
        except (KeyError, ValueError):
            continue
        name = _ARM_CORES.get((maker, part)) or f"{_ARM_MAKERS.get(maker, 'Arm-compatible')} (Arm part {part:#05x})"
        if name not in names:
            names.append(name)
    return " + ".join(names) or None


def meminfo(text: str) -> dict[str, int]:
    """Parse `/proc/meminfo`, in bytes: MemTotal, MemAvailable, SwapTotal, SwapFree, ..."""
    return {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d{1,18}) kB$", text, re.MULTILINE)}


def cgroup_paths(text: str, controller: str) -> tuple[str | None, str | None]:
    """Parse `/proc/self/cgroup`: (path in the v2 tree, path in the controller's v1 tree); None: not a member.

    Lines are `0::/user.slice` in v2, and `4:memory:/docker/3f9c` in v1.
    """
    unified = legacy = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers and path.startswith("/"):
            unified = path
        elif controller in controllers.split(",") and path.startswith("/"):
            legacy = path
    return unified, legacy


def cgroup_bytes(text: str) -> int | None:
    """Parse one number of a cgroup memory file. `max`, near 2**63 in v1, is None: no limit."""
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**60:
        return None
    return int(text)


def cgroup_stat(text: str, name: str) -> int | None:
    """Parse one line of `memory.stat` (`inactive_file 4096`)."""
    return _number(rf"^{re.escape(name)} ([0-9]{{1,20}})$", text)


def cgroup_cpus(text: str) -> float | None:
    """Parse the CPUs granted by `cpu.max` (`200000 100000` -> 2.0), None without a limit."""
    match = re.fullmatch(r"\s*([0-9]{1,15})\s+([0-9]{1,15})\s*", text)
    if match is None or not int(match[1]) or not int(match[2]):
        return None
    return int(match[1]) / int(match[2])


def sysctl(text: str) -> dict[str, str]:
    """Parse `sysctl a b c`, one `name: value` per line. Unknown names are absent."""
    return {name: value.strip() for name, value in re.findall(r"^([\w.]+): (.*)$", text, re.MULTILINE)}


def swap_used(text: str) -> int | None:
    """Parse the bytes in use of `vm.swapusage` (`total = 2048.00M  used = 416.94M  free = ...`)."""
    match = re.search(r"used = ([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMGT])", text)
    if match is None:
        return None
    power = "KMGT".index(match[2]) + 1
    return int(float(match[1]) * 1024**power)


def ioreg_gpu_cores(text: str) -> int | None:
    """Parse `"gpu-core-count" = 40` anywhere in `ioreg` output."""
    return _number(r'"gpu-core-count"\s*=\s*([0-9]{1,4})\b', text)


def system_profiler_gpu_cores(text: str) -> int | None:
    """Parse the first `sppci_cores` of `system_profiler SPDisplaysDataType -json`."""
    try:
        displays = json.loads(text)["SPDisplaysDataType"]
        counts = [int(gpu["sppci_cores"]) for gpu in displays if "sppci_cores" in gpu]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # overflow: `Infinity` is JSON to Python
        return None
    if not counts or counts[0] <= 0:
        return None
    return counts[0]


def power(text: str) -> Power:
    """Parse `pmset -g batt`: power source, and battery charge (none on desktop Macs)."""
    source = re.search(r"Now drawing from '([^'\n]*)'", text)
    on_battery = None
    if source is not None:
        on_battery = source[1] == "Battery Power"
    # ` -InternalBattery-0 (id=4522083)	85%; discharging; 5:12 remaining`
    return Power(on_battery, battery_percent=_number(r"InternalBattery[^\n]*?\t?([0-9]{1,3})%", text))


def low_power_mode(text: str) -> bool | None:
    """Parse `lowpowermode 1` of `pmset -g`; on newer Macs `powermode`: 0 automatic, 1 low, 2 high power."""
    mode = _number(r"^\s*(?:lowpowermode|powermode)\s+([012])\s*$", text)
    if mode is None:
        return None
    return mode == 1


def thermal_pressure(level: int | None) -> ThermalPressure | None:
    """Return the name of a level of com.apple.system.thermalpressurelevel, 0 (nominal) to 4 (sleeping)."""
    if level is None:
        return None
    return ("nominal", "moderate", "heavy")[min(level, 2)]


def speed_limited(text: str) -> bool | None:
    """Return whether `pmset -g therm` reports a CPU speed under 100 % or a warning level over 0.

    None if nothing is reported, as always on Apple silicon.
    """
    limit = _number(r"CPU_Speed_Limit\s*=\s*([0-9]{1,3})", text)  # CPU_Speed_Limit = 73
    level = _number(r"(?:[Tt]hermal|[Pp]erformance) [Ww]arning [Ll]evel\s*[=:]?\s*([0-9])", text)
    if limit is None and level is None:
        return None
    return (limit is not None and limit < 100) or (level is not None and level > 0)


def core_kinds(facts: dict[str, str]) -> dict[str, int]:
    """Return cores by kind, fastest first, from `hw.perflevelN.*`: {Performance: 12, Efficiency: 4}.

    Empty unless there are several kinds.
    """
    usual = ("Performance", "Efficiency")
    kinds: dict[str, int] = {}
    for level in range(len(usual)):
        count = facts.get(f"hw.perflevel{level}.physicalcpu", "")
        if re.fullmatch(r"[0-9]{1,4}", count):
            kinds[facts.get(f"hw.perflevel{level}.name") or usual[level]] = int(count)
    if len(kinds) < 2:
        return {}
    return kinds


def vm_stat_available(text: str) -> int | None:
    """Return the bytes available without swapping: free, inactive, speculative and purgeable pages."""
    size = re.search(r"page size of ([0-9]{1,9}) bytes", text)
    pages = {name: int(n) for name, n in re.findall(r"^Pages (\w+):\s+([0-9]{1,15})\.", text, re.MULTILINE)}
    if not size or "free" not in pages:
        return None
    return int(size[1]) * sum(pages.get(kind, 0) for kind in ("free", "inactive", "speculative", "purgeable"))


def _number(pattern: str, text: str) -> int | None:
    """Return the number in the first group of the first match, also within a line; None without a match."""
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return None
    return int(match[1])


def _fields(block: str) -> dict[str, str]:
    """Parse the `key : value` lines of one block."""
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
