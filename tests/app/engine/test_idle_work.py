"""When an idle engine measures, and that no question waits for it."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.engine import idle_work
from headrace.app.engine.events import PeakMeasured
from headrace.app.engine.idle_work import IdleWork
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import HeadraceError
from headrace.runtime.machine.machine_load import CPUUse
from headrace.runtime.machine.peaks import Peak
from tests.support.scripted_engine import MACHINE, PEAK
from tests.support.summaries import make_summary


class DiskCache:
    write_due = False


class Memory:
    """A streaming read whose filling ends when it is told to."""

    def __init__(self) -> None:
        self.filling, self.filled = threading.Event(), threading.Event()
        self.passes = 0

    def measure(self, *_: object, progress: Callable[[float], None], **__: object) -> Peak:
        self.filling.set()
        assert self.filled.wait(60)
        progress(0.0)
        self.passes += 1
        return PEAK


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(idle_work, "measure_peak", memory.measure)
    monkeypatch.setattr(idle_work, "measure_now", memory.measure)
    monkeypatch.setattr(idle_work, "machine", lambda: MACHINE)
    return memory


@pytest.fixture
def work(model: Path, memory: Memory) -> IdleWork:  # noqa: ARG001
    return IdleWork(resolve(str(model)), DiskCache())  # type: ignore[arg-type]


def answered(work: IdleWork) -> None:
    work.busy()
    work.idle()


def test_nothing_is_measured_before_the_first_answer(work: IdleWork) -> None:
    assert not work.due
    work.busy()
    assert not work.due
    work.idle()
    assert work.due


def test_grammars_are_prepared_once_and_first(work: IdleWork) -> None:
    prepared: list[bool] = []
    later = work.after_s
    work.prepare = lambda: prepared.append(True)
    assert work.due
    assert work.after_s < later
    work.run(lambda: False, print)
    assert (prepared, work.due, work.after_s) == ([True], False, later)


def test_nothing_is_measured_while_a_message_is_written(work: IdleWork) -> None:
    answered(work)
    work.typing = True
    assert not work.due
    answered(work)  # it was sent
    assert work.due


def test_a_question_does_not_wait_until_memory_is_filled(work: IdleWork, memory: Memory) -> None:
    answered(work)
    sent: list[Any] = []
    work.run(memory.filling.is_set, sent.append)  # the question comes while memory is being filled
    assert sent == []
    assert not work.due  # the thread is still at it
    memory.filled.set()
    assert work._reader is not None
    work._reader.join(60)
    assert memory.passes == 0
    assert work.due
    work.run(lambda: False, sent.append)
    assert sent == [PeakMeasured(PEAK, work.compute_flops, work.memory_gb_s)]


def test_a_failed_measurement_is_not_repeated(work: IdleWork, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> Peak:
        raise OSError("no memory")

    monkeypatch.setattr(idle_work, "measure_peak", fail)
    answered(work)
    sent: list[Any] = []
    work.run(lambda: False, sent.append)
    assert sent == []
    assert not work.due
    answered(work)
    assert not work.due


def test_a_gpu_is_measured_on_the_thread_of_the_model(work: IdleWork, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(idle_work, "machine", lambda: replace(MACHINE, backend="metal"))
    monkeypatch.setattr(idle_work, "measure_peak", lambda **_: threads.append(threading.current_thread()) or PEAK)
    answered(work)
    work.run(lambda: False, lambda _: None)
    assert threads == [threading.current_thread()]


ANSWER = make_summary(achieved_gb_s=15.0, mbu=None)


@pytest.fixture
def reading(work: IdleWork, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a known peak that reads 30 GB/s now: `use` of its CPUs, and the seconds of `now`."""
    state: dict[str, Any] = {"use": None, "now": 1000.0}
    memory.filled.set()
    work.peak = replace(PEAK, bytes_per_second=60e9)
    work.compute_flops = 1e12
    monkeypatch.setattr(idle_work, "measure_now", lambda *_, **__: replace(PEAK, bytes_per_second=30e9))
    monkeypatch.setattr(idle_work, "cached_peak", lambda: work.peak)
    monkeypatch.setattr(idle_work, "correct_peak", lambda *_, **__: None)
    monkeypatch.setattr(idle_work.CPUMeter, "use", lambda _: state["use"])
    monkeypatch.setattr(idle_work, "time", SimpleNamespace(monotonic=lambda: state["now"]))
    answered(work)
    return state


@pytest.mark.usefixtures("reading")
def test_an_answer_is_compared_with_the_latest_reading(work: IdleWork) -> None:
    assert work.mbu(ANSWER) == 15 / 60
    sent: list[Any] = []
    work.run(lambda: False, sent.append)
    assert [event.memory_gb_s for event in sent] == [30.0]
    assert work.mbu(ANSWER) == 15 / 30
    assert work.mbu(replace(ANSWER, achieved_gb_s=40.0)) == 40 / 60
    assert work.mbu(replace(ANSWER, busy=True)) is None


def test_no_answer_is_compared_with_a_reading_under_load(work: IdleWork, reading: dict[str, Any]) -> None:
    reading["use"] = CPUUse(2, busy_cpus=2.0, own_cpus=1.0)
    work.run(lambda: False, lambda _: None)
    assert work.memory_gb_s is None
    assert work.mbu(ANSWER) == 15 / 60


@pytest.mark.parametrize(("again", "seconds", "due"), [(True, 61, True), (True, 59, False), (False, 61, False)])
def test_memory_is_read_again_after_an_answer(
    again: bool, seconds: float, due: bool, work: IdleWork, reading: dict[str, Any]
) -> None:
    work.run(lambda: False, lambda _: None)
    if again:
        answered(work)
    reading["now"] += seconds
    assert work.due is due


def test_a_failed_preparation_is_logged(work: IdleWork, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare() -> None:
        raise HeadraceError("the store cannot be read")

    work.prepare = prepare
    work.run(lambda: False, lambda _: None)
    assert work.prepare is None
    assert "the store cannot be read" in capsys.readouterr().err
