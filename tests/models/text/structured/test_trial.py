"""The process for trials of grammars: an end that is no fault of a grammar, several threads, and forks."""

import subprocess
import sys
from collections.abc import Callable
from threading import Lock

import pytest

from headrace.models.text.structured import trial as trial_module
from headrace.models.text.structured.trial import Trial, TrialError
from tests.support.patience import PATIENCE_S


def _trial() -> Trial:
    return Trial(300, {299: b"<end>"}, [299])


def test_a_vocabulary_that_ends_the_process_refuses_no_grammar() -> None:
    """As where the process has too little memory for it. No grammar starts another process."""
    trial = Trial(10, {99: b"<x>"}, [99])  # there is no token 99
    trial.check("{}", {})
    trial.start()
    assert trial._worker is None
    trial.check("{}", {})


class _EndedByGrammars:
    """A `Worker` whose process ends with the first job after the vocabulary."""

    def __init__(self, _module: str) -> None:
        self._has_vocabulary = False
        self.has_ended = False

    def wait_until_ready(self) -> None:
        """Return at once."""

    def answer(self, _job: bytes, _max_bytes: int) -> bytes:
        """Return the answer to the vocabulary. Raises EOFError for a grammar."""
        if self._has_vocabulary:
            self.end()
            raise EOFError
        self._has_vocabulary = True
        return b""

    def end(self) -> None:
        """End the process."""
        self.has_ended = True


class _ContendedLock:
    """A lock that another thread always has first, for `work`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._work()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_process_that_another_thread_ends_is_replaced_before_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the grammar would be compiled in the program, without limits."""
    monkeypatch.setattr(trial_module, "Worker", _EndedByGrammars)
    trial = _trial()
    trial._lock = _ContendedLock(trial._end)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(TrialError):
            trial.check("{}", {})


_FORK = """
import os, signal
from headrace.models.text.structured.trial import Trial
trial = Trial(300, {299: b"<end>"}, [299])
trial.check("{}", {})
first = trial._worker.process.pid
trial._lock.acquire()  # for another thread, which a fork does not copy
fork = os.fork()
if fork == 0:
    signal.alarm(30)  # ends a fork that waits for the lock
    trial.check("{}", {})
    os._exit(int(trial._worker.process.pid == first))
assert os.waitpid(fork, 0)[1] == 0
trial._lock.release()
trial.check("{}", {})
assert trial._worker.process.pid == first
"""


def test_a_fork_starts_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=PATIENCE_S)
