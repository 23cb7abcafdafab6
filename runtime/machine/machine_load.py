"""CPU and memory load of the machine, and contention with decoding.

`CPUMeter` reads procfs, in about 50 us. `runtime.machine.load_sampler` samples more, on every system, with psutil.

A contended answer or measurement is marked as busy, and its figures are not taken as the machine's (`Summary.busy`,
`Peak.busy`). tests/runtime/machine/test_machine_load.py has procfs of loaded machines.
"""

import os
import time
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.hardware import read_file
from headrace.runtime.machine.sensors import Readings

LEAST_S = 0.2  # shorter spans are a few ticks of the clock
_FULL = 0.9  # share of the CPUs from which processes wait
_NOTABLE = 0.15  # share of other programs that counts while the CPUs are full
_MUCH = 0.5  # share of other programs that always counts


class CPUUse(Struct, frozen=True):
    """CPUs in use over a span of time; a CPU that was busy for half of it counts as 0.5.

    cpus: of the machine.
    busy_cpus: with any program.
    own_cpus: with this program's processes.
    """

    cpus: int
    busy_cpus: float
    own_cpus: float

    @property
    def other_cpus(self) -> float:
        """CPUs busy with other programs and virtual machines."""
        return max(0.0, self.busy_cpus - self.own_cpus)

    @property
    def contended(self) -> bool:
        """True if other programs slow decoding down."""
        full = self.busy_cpus >= _FULL * self.cpus and self.other_cpus >= _NOTABLE * self.cpus
        return full or self.other_cpus >= _MUCH * self.cpus


class MachineLoad(CPUUse, frozen=True):
    """One sample of the load.

    memory_used, memory_total, swap_used: bytes of the machine.
    readings: of the sensors.
    busiest: name of the busiest other process; empty if not known yet.
    energy: since the last sample; None if unknown.
    """

    memory_used: int
    memory_total: int
    swap_used: int
    readings: Readings = field(default_factory=Readings)
    busiest: str = ""
    energy: EnergyUse | None = None


class CPUMeter:
    """Use of the CPUs by this program and by others, since the meter was made."""

    def __init__(
        self,
        own_pids: Sequence[int] = (),
        read: Callable[[str], str] = read_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """own_pids: other processes of this program."""
        self._own_pids = own_pids
        self._read = read
        self._clock = clock
        self._began = self._now()

    def use(self) -> CPUUse | None:
        """Return the use so far; None for spans below LEAST_S, and where procfs has no counts."""
        began = self._began
        now = self._now()
        if began is None or now is None:
            return None
        elapsed = now.at - began.at
        if elapsed < LEAST_S:
            return None
        busy = min(float(now.cpus), max(0.0, now.busy_s - began.busy_s) / elapsed)
        return CPUUse(now.cpus, busy, (now.own_s - began.own_s) / elapsed)

    def _now(self) -> "_CPUCounters | None":
        """Return the counts so far; None without procfs.

        Lines of /proc/stat, in ticks: `cpu 4705 150 1120 16250 520 30 45 0 0 0` for all CPUs, then `cpu0` and so on.
        """
        lines = [line.split() for line in self._read("/proc/stat").splitlines() if line.startswith("cpu")]
        if not lines or len(lines[0]) < 6:
            return None
        _, *ticks_of_all = lines[0]
        cpus = len(lines) - 1
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, *others = (int(ticks) / tick for ticks in ticks_of_all)
        busy = user + nice + system + sum(others[:3])  # irq, softirq and stolen time; guests are in `user`
        own_s = time.process_time() + sum(_spent(self._read(f"/proc/{pid}/stat")) / tick for pid in self._own_pids)
        return _CPUCounters(self._clock(), cpus, busy, own_s)


class _CPUCounters(Struct, frozen=True):
    """Counters at one time.

    at: of the clock.
    cpus: number of CPUs.
    busy_s: CPU seconds of all programs since the start of the machine.
    own_s: CPU seconds of this program's processes since their start.
    """

    at: float
    cpus: int
    busy_s: float
    own_s: float


def _spent(stat: str) -> int:
    """Return the ticks of user and system time in a process's stat line; 0 for a process that is gone."""
    # After `4711 (name) `, where a name may have any character: state, ..., and as the 12th and 13th utime and stime.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13:
        return 0
    return int(fields[11]) + int(fields[12])
