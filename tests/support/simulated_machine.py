"""A machine that exists only as a clock and a memory speed: for testing statistics without timing anything.

The noise is that of the two-core virtual machine this was written on, from a minute of 2 ms streaming reads: memory
speed has a relative deviation of 4 % and forgets where it was within about a second; single measurements add 1 %.
"""

import math
import random
from collections.abc import Sequence
from unittest.mock import patch

from headrace.app.bench.measure import session as measured_session
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.records import RunDocument, Speed
from headrace.app.bench.measure.sample import Sample, typical_speed
from headrace.app.bench.measure.session import BenchSession
from tests.support.bench import bench_result, repetition_figures, run_document

MEMORY_SD = 0.04  # of the logarithm of memory speed
MEMORY_SECONDS = 0.8  # in which memory speed forgets all but 1 / e of a deviation
JITTER = 0.01  # of the logarithm of a measurement
_PARTS = 8  # of a span, in each of which memory speed is taken as constant
_MEAN_GB_S = 45.0
_READ_S = 0.04  # of a measurement of memory speed
_BY_MEMORY = 0.8  # power of memory speed that the speed of a step follows


class Machine:
    """Time passes when somebody works; memory speed wanders with it (an Ornstein-Uhlenbeck process)."""

    def __init__(self, seed: int, *, sd: float = MEMORY_SD, seconds: float = MEMORY_SECONDS) -> None:
        self.now = 0.0
        self._random = random.Random(seed)
        self._sd = sd
        self._seconds = seconds
        self._state = self._random.gauss(0, sd)

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> float:
        """Let time pass; the mean log memory speed meanwhile."""
        states = []
        for _ in range(_PARTS):
            kept = math.exp(-seconds / _PARTS / self._seconds)
            self._state = self._state * kept + self._random.gauss(0, self._sd * math.sqrt(1 - kept * kept))
            states.append(self._state)
        self.now += seconds
        return sum(states) / len(states)

    def memory_gb_s(self) -> float:
        return _MEAN_GB_S * math.exp(self.pass_time(_READ_S) + self._random.gauss(0, JITTER))

    def step_s(self, seconds: float, steps: int) -> float:
        """The typical latency of `steps` steps that take `seconds` each at average memory speed."""
        return seconds / math.exp(_BY_MEMORY * self.pass_time(seconds * steps) + self._random.gauss(0, JITTER))


class IdleMeter:
    """No reading of the CPUs of the machine that simulates."""

    def use(self) -> None: ...


class Backend:
    """Decodes at 4 ms a step (times `slower`), prefills at 2 ms a token."""

    engine = "headrace"
    model = "simulated"

    def __init__(self, machine: Machine, slower: float = 1.0) -> None:
        self._machine = machine
        self._slower = slower
        self.warmed: list[Test] = []
        self.measured: list[Test] = []

    def warm_up(self, test: Test) -> None:
        self.warmed.append(test)
        self._machine.pass_time(0.1)

    def measure(self, test: Test) -> Sample:
        self.measured.append(test)
        prefill_s = 0.0
        if test.prompt:
            prefill_s = self._machine.step_s(0.002 * self._slower, test.prompt) * test.prompt
        steps = max(test.generate - 1, 0)
        step_s = 0.0
        if steps:
            step_s = self._machine.step_s(0.004 * self._slower, steps)
        return Sample(prefill_s, 0.004, [step_s] * steps)

    def close(self) -> None: ...


def document(
    seed: int, tests: Sequence[Test], *, slower: float = 1.0, rounds: int | None = None, **noise: float
) -> RunDocument:
    """Return a document from a simulated machine, with the figures that `compare` reads."""
    machine = Machine(seed, **noise)
    session = BenchSession(
        [Backend(machine, slower)], tests, rounds=rounds, memory=machine.memory_gb_s, clock=machine.clock
    )
    with patch.object(measured_session, "CPUMeter", IdleMeter):
        for _ in session.run():
            pass
    results = [
        bench_result(
            engine=engine,
            model=model,
            test=test.name,
            depth=test.depth,
            tokens_per_second=Speed(typical_speed(test, kept[0].sample), 0.0, 1.0, None, None),
            repetitions=[repetition_figures(typical_speed(test, one.sample), one.memory_gb_s) for one in kept],
        )
        for (engine, model, test), kept in session.repetitions.items()
    ]
    return run_document(results)
