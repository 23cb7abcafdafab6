"""Interleaved repetitions: every round measures every test with every backend, so drift affects all alike.

Even rounds go backwards. Memory is read between measurements, which gives each repetition a bandwidth.

Without a fixed number a run takes MIN_ROUNDS, then continues until every speed is known to PRECISION or rounds or time
are used up.

A job is a backend and a test; a `Key` names it in results.

Guard: tests/app/bench/measure/test_session.py.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec import Struct

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.records import Result
from headrace.app.bench.measure.sample import Backend, Repetition, typical_speed
from headrace.app.bench.stats import sd, student_quantile
from headrace.runtime.errors import EngineError
from headrace.runtime.machine.machine_load import CPUMeter

# Rounds go on until all means are known to PRECISION, within these bounds.
MIN_ROUNDS = 5
MAX_ROUNDS = 40
MAX_SECONDS = 120.0
PRECISION = 0.01  # half the width of the 95 % interval, as a fraction

_Job = tuple[Backend, Test]
Key = tuple[str, str, Test]
"""(engine, model, test) of a job."""


class BenchProgress(Struct, frozen=True):
    """The next measurement, or the end.

    doing: its name.
    done, total: numbers of measurements, with warm-ups.
    left_s: seconds left, None while unknown.
    round: from 1; 0 while warming up.
    """

    doing: str
    done: int
    total: int
    left_s: float | None
    round: int


Results = Sequence[Result]
Show = Callable[[BenchProgress, Callable[[], Results]], None]
"""Called with progress and a function that returns the results so far."""


class BenchSession:
    """The measurements of a run.

    notes: a line for each peer that failed and was dropped.
    repetitions: by job, in the order of rounds; valid at any interrupt.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        tests: Sequence[Test],
        *,
        rounds: int | None,
        memory: Callable[[], float] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Plan the jobs; nothing is measured before `run`.

        rounds: number of them; None: as many as the precision takes.
        memory: reads memory and returns its GB/s; None: memory is not read.
        clock: returns seconds.
        """
        self._jobs = [(backend, test) for test in tests for backend in backends]
        self._rounds = rounds
        self._memory = memory
        self._clock = clock
        self._last_s: dict[Key, float] = {}  # duration of the latest repetition
        self._logs: dict[Key, list[float]] = {}  # of the typical speeds
        self._round = 0
        self._failed: list[Backend] = []
        self.notes: list[str] = []
        self.repetitions: dict[Key, list[Repetition]] = {_key(*job): [] for job in self._jobs}

    def run(self) -> Iterator[BenchProgress]:
        """Measure, yielding `BenchProgress` before every measurement and at the end."""
        for number, (backend, test) in enumerate(self._jobs):
            yield BenchProgress(_named(backend, test), number, self._total(), None, 0)
            self._attempt(backend, partial(backend.warm_up, test))
        self._leave_out_failed()
        began = self._clock()
        while not self._finished(self._clock() - began):
            self._round += 1
            # Every other round backwards, so that drift within a round favours none.
            jobs = self._jobs if self._round % 2 else self._jobs[::-1]
            for done, (backend, test) in enumerate(jobs):
                counted = len(self._jobs) * self._round + done
                yield BenchProgress(_named(backend, test), counted, self._total(), self._left(jobs[done:]), self._round)
                self._attempt(backend, partial(self._measure, backend, test, began))
            self._leave_out_failed()
        yield BenchProgress("done", self._total(), self._total(), 0.0, self._round)

    def _attempt(self, backend: Backend, work: Callable[[], None]) -> None:
        """Call a backend; an error of our engine ends the run, a peer's removes the peer."""
        if backend in self._failed:
            return
        try:
            work()
        except EngineError as error:
            if backend.engine == "headrace":
                raise
            self._failed.append(backend)
            since = f" from round {self._round} on" if self._round else ""
            self.notes.append(f"{backend.engine} is left out{since}: {error}")

    def _leave_out_failed(self) -> None:
        self._jobs = [(backend, test) for backend, test in self._jobs if backend not in self._failed]

    def _measure(self, backend: Backend, test: Test, began: float) -> None:
        key = _key(backend, test)
        started = self._clock()
        meter = CPUMeter()
        memory_gb_s = None  # mean of before and after
        if self._memory is None:
            sample = backend.measure(test)
        else:
            before = self._memory()
            sample = backend.measure(test)
            memory_gb_s = (before + self._memory()) / 2
        self._last_s[key] = self._clock() - started
        cpu_use = None
        if backend.engine == "headrace":
            cpu_use = meter.use()
        self.repetitions[key].append(Repetition(sample, started - began, memory_gb_s, cpu_use))
        self._logs.setdefault(key, []).append(math.log(typical_speed(test, sample)))

    def _finished(self, elapsed: float) -> bool:
        if self._rounds is not None:
            return self._round >= self._rounds
        if self._round < MIN_ROUNDS:
            return False
        return self._round >= MAX_ROUNDS or elapsed > MAX_SECONDS or self._worst_precision() <= PRECISION

    def _worst_precision(self) -> float:
        return max(precision(self._logs.get(_key(*job), [])) for job in self._jobs)

    def _total(self) -> int:
        """Return the number of measurements in the run, warm-ups included."""
        return len(self._jobs) * (self._rounds_expected() + 1)

    def _rounds_expected(self) -> int:
        """Return the fixed number of rounds or an estimate: the error falls as 1 / sqrt(n)."""
        if self._rounds is not None:
            return self._rounds
        counts = [len(self.repetitions[_key(*job)]) for job in self._jobs]
        if min(counts) < MIN_ROUNDS:
            return max(MIN_ROUNDS, self._round)
        needed = math.ceil(min(counts) * (self._worst_precision() / PRECISION) ** 2)
        affordable = math.ceil(MAX_SECONDS / max(self._seconds(self._jobs), 1e-9))
        return max(self._round, min(needed, affordable, MAX_ROUNDS))

    def _left(self, jobs: Sequence[_Job]) -> float | None:
        if any(_key(*job) not in self._last_s for job in self._jobs):
            return None
        num_rounds = self._rounds_expected() - self._round  # after this one
        return self._seconds(jobs) + num_rounds * self._seconds(self._jobs)

    def _seconds(self, jobs: Sequence[_Job]) -> float:
        """Return the duration of one repetition of each job, by the latest."""
        return sum(self._last_s[_key(*job)] for job in jobs)


def _named(backend: Backend, test: Test) -> str:
    return f"{test.label} · {backend.engine} {backend.model}"


def _key(backend: Backend, test: Test) -> Key:
    return backend.engine, backend.model, test


def precision(logs: Sequence[float]) -> float:
    """Return half the width of the 95 % t interval of the mean logarithm: a relative error."""
    if len(logs) < 2:
        return math.inf
    return student_quantile(0.975, len(logs) - 1) * sd(logs) / math.sqrt(len(logs))
