"""CPU use of this program and of others, from recorded counts."""

import os

import pytest

from headrace.runtime.machine.cpu_use import LEAST_S, CPUMeter

TICK = os.sysconf("SC_CLK_TCK")


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
