"""Machine load and contention, from psutil and from procfs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runtime.machine.load_sampler import LoadSampler
from headrace.runtime.machine.machine_load import LEAST_S, CPUMeter, MachineLoad
from headrace.runtime.machine.sensors import Readings

TICK = os.sysconf("SC_CLK_TCK")


def _load(cpus: int, busy: float, own: float) -> MachineLoad:
    return MachineLoad(cpus, busy, own, memory_used=1 << 30, memory_total=8 << 30, swap_used=0)


@pytest.mark.parametrize(
    ("cpus", "busy", "own", "contended"),
    [
        (2, 2.0, 1.95, False),  # decoding alone
        (2, 2.0, 1.3, True),  # something else wants a core
        (2, 0.1, 0.0, False),
        (2, 1.1, 0.0, True),  # idle here, but half of the machine is taken
        (16, 8.0, 7.0, False),  # there is room
        (16, 15.0, 8.0, True),
        (16, 16.5, 17.0, False),  # the clocks of the two counts differ a little
    ],
)
def test_load_of_other_programs_beyond_free_cores_is_contention(
    cpus: int, busy: float, own: float, contended: bool
) -> None:
    load = _load(cpus, busy, own)
    assert load.contended is contended
    assert load.other_cpus >= 0


class Machine:
    """Stands in for psutil: two CPUs, a process of ours and two of others."""

    Error = ProcessLookupError

    def __init__(self) -> None:
        self.busy = 100.0
        self.idle = 50.0
        self.spent = {1: 10.0, 2: 20.0, 3: 30.0}
        self.names = {1: "headrace", 2: "make", 3: "cc1plus"}
        self.scans = 0

    def run(self, **by_pid: float) -> None:
        for pid, seconds in by_pid.items():
            self.spent[int(pid[1:])] += seconds
            self.busy += seconds

    def cpu_times(self) -> Any:
        class Times(tuple[float, ...]):
            idle = self.idle

        return Times((self.busy, self.idle))

    def cpu_count(self) -> int:
        return 2

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=8 << 30, available=6 << 30)

    def swap_memory(self) -> Any:
        return SimpleNamespace(used=5)

    def Process(self, pid: int) -> "Process":  # noqa: N802 - as psutil has it
        if pid not in self.spent:
            raise self.Error
        return Process(self, pid)

    def process_iter(self) -> Iterator["Process"]:
        self.scans += 1
        yield from (Process(self, pid) for pid in self.spent)
        yield Process(self, 9)  # of another user


@dataclass(frozen=True, eq=False)
class Process:
    """Stands in for a process of psutil."""

    machine: Machine
    pid: int

    def cpu_times(self) -> Any:
        if self.pid not in self.machine.spent:
            raise self.machine.Error
        return SimpleNamespace(user=self.machine.spent[self.pid], system=0.0)

    def name(self) -> str:
        return self.machine.names[self.pid]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr("headrace.runtime.machine.load_sampler.psutil", found)
    return found


def _sampler() -> LoadSampler:
    seconds = iter(range(100))
    return LoadSampler("cpu", clock=lambda: float(next(seconds)), sensors_of=lambda _: Readings)


def test_a_load_covers_the_time_since_the_last_sample(machine: Machine) -> None:
    sampler = _sampler()
    assert sampler.sample([1]) is None
    machine.run(p1=1.5, p2=0.2)
    load = sampler.sample([1])
    assert load is not None
    assert (load.busy_cpus, load.own_cpus, load.other_cpus) == pytest.approx((1.7, 1.5, 0.2))
    assert (load.memory_used, load.memory_total, load.swap_used) == (2 << 30, 8 << 30, 5)
    assert load.busiest == ""
    assert machine.scans == 0  # nobody is in the way, so nobody is looked for


def test_the_busiest_process_is_found_in_two_samples(machine: Machine) -> None:
    sampler = _sampler()
    names = []
    for _ in range(5):
        machine.run(p1=1.0, p2=0.3, p3=0.7)
        load = sampler.sample([1])
        names.append(load.busiest if load else None)
    assert names == [None, "", "cc1plus", "cc1plus", "cc1plus"]
    assert machine.scans == 2
    machine.run(p1=1.9)
    sampler.sample([1])
    machine.run(p1=1.0, p2=1.0)
    load = sampler.sample([1])
    assert load is not None
    assert load.busiest == ""  # another time, perhaps another one


def test_processes_that_start_and_end_are_counted(machine: Machine) -> None:
    sampler = _sampler()
    sampler.sample([1, 77])
    machine.run(p1=1.0, p2=0.5)
    load = sampler.sample([1, 2])  # 2 is ours from now on; what it did before does not count
    assert load is not None
    assert load.own_cpus == pytest.approx(1.0)


def test_a_sample_of_this_machine_is_within_its_cores_and_memory() -> None:
    sampler = LoadSampler("cpu")
    sampler.sample([os.getpid()])
    load = sampler.sample([os.getpid()])
    assert load is not None
    assert 0 <= load.busy_cpus <= load.cpus
    assert 0 < load.memory_used < load.memory_total


class Files:
    """procfs of a machine with two CPUs and a chat with process id 7."""

    def __init__(self) -> None:
        self.busy_s = 100.0
        self.idle_s = 900.0
        self.stolen_s = 0.0
        self.chat_s = 3.0

    def read(self, path: str) -> str:
        if path == "/proc/stat":
            half = [round(self.busy_s / 2 * TICK)] * 2
            fields = [half[0], 0, half[1], round(self.idle_s * TICK), 50, 0, 0, round(self.stolen_s * TICK), 999, 0]
            return f"cpu  {' '.join(map(str, fields))}\ncpu0 1 2\ncpu1 1 2\nintr 7\n"
        spent = round(self.chat_s * TICK)
        return f"7 (a ) b) S {' '.join(['0'] * 10)} {spent} 0 0 0" if path == "/proc/7/stat" else ""


@pytest.mark.parametrize(
    ("others_s", "stolen_s", "chat_s", "contended"),
    [
        (0.0, 0.0, 0.0, False),
        (1.1, 0.0, 0.0, True),
        (0.0, 1.1, 0.0, True),  # a neighbour of the virtual machine
        (1.1, 0.0, 1.1, False),  # the chat is this program, too
    ],
)
def test_cpu_use_of_processes_and_the_machine(
    others_s: float, stolen_s: float, chat_s: float, contended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.process_time", lambda: 5.0)
    files = Files()
    now = [0.0]
    meter = CPUMeter([7], files.read, lambda: now[0])
    now[0] = 1.0
    files.busy_s += others_s
    files.stolen_s += stolen_s
    files.chat_s += chat_s
    use = meter.use()
    assert use is not None
    assert use.cpus == 2
    assert use.other_cpus == pytest.approx(others_s + stolen_s - chat_s, abs=3 / TICK)
    assert use.contended is contended


@pytest.mark.parametrize(("seconds", "stat"), [(LEAST_S / 2, None), (1.0, ""), (1.0, "cpu  1 2\n")])
def test_cpu_use_is_unknown_over_a_short_span_or_unreadable_statistics(seconds: float, stat: str | None) -> None:
    files = Files()
    now = [0.0]
    meter = CPUMeter([8], files.read if stat is None else lambda _: stat, lambda: now[0])
    now[0] = seconds
    assert meter.use() is None


def test_cpu_use_over_no_time_is_unknown() -> None:
    meter = CPUMeter([1 << 30])
    assert meter.use() is None  # too short
