"""Background work: result, errors, and no wait for work that cannot end."""

import threading

import pytest

from headrace.runtime.machine import background as module
from headrace.runtime.machine.background import run_in_background


def test_background_work_returns_its_result_or_raises_its_error() -> None:
    with run_in_background(lambda: threading.current_thread().name) as name:
        pass
    assert [name(), name()] == ["background"] * 2

    def fail() -> None:
        raise ValueError("no")

    with run_in_background(fail) as failed:
        pass
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed()


def test_work_that_waits_for_the_interrupted_thread_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    lock = threading.Lock()
    with lock, pytest.raises(KeyboardInterrupt), run_in_background(lock.acquire):
        raise KeyboardInterrupt
