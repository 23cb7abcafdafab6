"""Sampling of machine load: CPUs, memory and swap from psutil, plus `sensors`.

The busiest process is searched only under contention, over two samples, since that reads every process. Shares and
rates refer to the time since the previous sample.

The terminal UI samples (`app/tui/metrics/machine_watch.py`), in its own process, not the engine's.

Guard: tests/runtime/machine/test_machine_load.py.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil
from msgspec.structs import replace

from headrace.runtime.machine.energy import energy_between
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.machine.sensors import Readings, Sensors, sensors


class _LoadSample(NamedTuple):
    """Counters at one time.

    at: of the clock.
    busy_s: CPU seconds of all processes since the start of the machine.
    readings: of the sensors.
    """

    at: float
    busy_s: float
    readings: Readings


class LoadSampler:
    """Sampler of the machine's load; call `sample` every second or two."""

    def __init__(
        self,
        backend: str,
        clock: Callable[[], float] = time.monotonic,
        sensors_of: Callable[[str], Sensors] = sensors,
    ) -> None:
        self._clock = clock
        self._sensors = sensors_of(backend)
        self._last: _LoadSample | None = None
        self._cpu_seconds: dict[int, float] = {}  # CPU seconds by process
        self._all: dict[int, float] = {}  # CPU seconds by process, of all processes, while contended
        self._busiest = ""

    def sample(self, own_pids: Iterable[int]) -> MachineLoad | None:
        """Return the load since the last call; None at the first. own_pids: of this program's processes."""
        # CPU seconds of all programs, and of this one's processes since the last call.
        now = self._clock()
        times = psutil.cpu_times()
        busy = (
            sum(times)
            - times.idle
            - getattr(times, "iowait", 0.0)
            - getattr(times, "guest", 0.0)
            - getattr(times, "guest_nice", 0.0)
        )
        seconds = {}
        for pid in own_pids:
            with contextlib.suppress(psutil.Error):  # a process that has ended
                spent = _spent(psutil.Process(pid))
                if spent is not None:
                    seconds[pid] = spent
        mine = sum(spent - self._cpu_seconds[pid] for pid, spent in seconds.items() if pid in self._cpu_seconds)

        # The counters of this call are those that the next one compares with.
        readings = self._sensors()
        last = self._last
        self._last = _LoadSample(now, busy, readings)
        self._cpu_seconds = seconds
        if last is None or now <= last.at:
            return None

        elapsed = now - last.at
        memory = psutil.virtual_memory()
        cpus = psutil.cpu_count() or 1
        load = MachineLoad(
            cpus=cpus,
            busy_cpus=min(float(cpus), max(0.0, busy - last.busy_s) / elapsed),
            own_cpus=mine / elapsed,
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            swap_used=_swap_used(),
            readings=readings,
            energy=energy_between(last.readings, readings, elapsed),
        )
        if not load.contended:
            self._all = {}
            self._busiest = ""
            return load
        return replace(load, busiest=self._find_busiest(seconds))

    def _find_busiest(self, own_pids: Iterable[int]) -> str:
        """Return the other process with the most CPU time since the last call; empty at the first."""
        if self._busiest:
            return self._busiest
        grown: dict[psutil.Process, float] = {}  # CPU seconds since the last call
        before = self._all
        self._all = {}
        # Without names of attributes: `process_iter` takes one and a half times as long with them.
        for process in psutil.process_iter():
            seconds = _spent(process)
            if seconds is None or process.pid in own_pids:
                continue
            self._all[process.pid] = seconds
            if process.pid in before:
                grown[process] = seconds - before[process.pid]
        if grown:
            with contextlib.suppress(psutil.Error):
                self._busiest = max(grown, key=grown.__getitem__).name()
        return self._busiest


def _spent(process: psutil.Process) -> float | None:
    """Return the CPU seconds of a process; None if it is gone, or another user's."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _swap_used() -> int:
    with warnings.catch_warnings():  # containers may lack swap statistics
        warnings.simplefilter("ignore", RuntimeWarning)
        return int(psutil.swap_memory().used)
