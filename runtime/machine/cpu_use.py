"""CPUs in use over a span of time, by this program and by others, from procfs.

A reading takes about 50 us. `runtime.machine.load_sampler` samples more, on every system, with psutil.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.runtime.machine.hardware import read_file
from headrace.runtime.machine.load import CPUUse

LEAST_S = 0.2  # shorter spans are a few ticks of the clock


class CPUMeter:
    """Use of the CPUs since the meter was made."""

    def __init__(
        self,
        own_pids: Sequence[int] = (),
        read: Callable[[str], str] = read_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """own_pids: other processes of this program."""
        self._own = own_pids
        self._read = read
        self._clock = clock
        self._began = self._now()

    def use(self) -> CPUUse | None:
        """Return the use so far; None for spans below LEAST_S, and where procfs has no counts."""
        began = self._began
        now = self._now()
        if began is None or now is None or (elapsed := now.at - began.at) < LEAST_S:
            return None
        busy = min(float(now.cpus), max(0.0, now.busy_s - began.busy_s) / elapsed)
        return CPUUse(now.cpus, busy, (now.own_s - began.own_s) / elapsed)

    def _now(self) -> "_Counts | None":
        lines = [line.split() for line in self._read("/proc/stat").splitlines() if line.startswith("cpu")]
        if not lines or len(lines[0]) < 6:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, *others = (int(value) / tick for value in lines[0][1:])
        busy = user + nice + system + sum(others[:3])  # interrupts and stolen time; guests are in `user`
        own_s = time.process_time() + sum(_spent(self._read(f"/proc/{pid}/stat")) / tick for pid in self._own)
        return _Counts(self._clock(), len(lines) - 1, busy, own_s)


@dataclass(frozen=True, slots=True)
class _Counts:
    """CPU seconds since the start of the machine and of the processes. at: of the clock."""

    at: float
    cpus: int
    busy_s: float
    own_s: float


def _spent(stat: str) -> int:
    """Return the ticks of user and system time in a process's stat line; 0 for a process that is gone."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13:
        return 0
    return int(fields[11]) + int(fields[12])
