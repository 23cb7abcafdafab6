"""Sessions: warm-up, rounds, order, stopping rule and interrupts."""

import itertools

import pytest
from msgspec.structs import replace

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.ratios import agreement, ratios, scaling
from headrace.app.bench.measure.records import Mean, Result
from headrace.app.bench.measure.sample import Sample
from headrace.app.bench.measure.session import MAX_ROUNDS, MIN_ROUNDS, BenchSession, precision
from headrace.runtime.errors import EngineError
from tests.support.bench import bench_result, repetition_figures
from tests.support.simulated_machine import Backend, Machine

TESTS = [Test(64, 0), Test(0, 32)]


def session(machine: Machine, *backends: Backend, rounds: int | None = 3) -> BenchSession:
    return BenchSession(backends, TESTS, rounds=rounds, memory=machine.memory_gb_s, clock=machine.clock)


def test_every_test_is_warmed_up_once_and_measured_every_round() -> None:
    machine = Machine(1)
    backend = Backend(machine)
    run = session(machine, backend)
    seen = list(run.run())
    assert backend.warmed == TESTS
    assert backend.measured == [*TESTS, *TESTS[::-1], *TESTS]  # even rounds go backwards
    assert {len(kept) for kept in run.repetitions.values()} == {3}
    assert [progress.done for progress in seen] == list(range(9))
    assert {progress.total for progress in seen} == {8}
    assert seen[-1].left_s == 0


def test_engines_take_turns_test_by_test() -> None:
    machine = Machine(1)
    ours = Backend(machine)
    theirs = Backend(machine)
    theirs.engine = "peer"
    order = [progress.doing for progress in session(machine, ours, theirs, rounds=1).run() if progress.round]
    assert order[:4] == [
        "pp64 · headrace simulated", "pp64 · peer simulated", "tg32 · headrace simulated", "tg32 · peer simulated",
    ]  # fmt: skip


def test_remaining_time_is_shown_after_the_first_round() -> None:
    machine = Machine(1, sd=0)
    left = [progress.left_s for progress in session(machine, Backend(machine)).run() if progress.round]
    assert left[:2] == [None, None]
    told = [seconds for seconds in left[2:] if seconds is not None]
    assert told == sorted(told, reverse=True)


def test_rounds_increase_with_the_noise_of_the_machine() -> None:
    def rounds(sd: float) -> int:
        machine = Machine(4, sd=sd)
        run = session(machine, Backend(machine), rounds=None)
        return max(progress.round for progress in run.run())

    assert rounds(0.0) in range(MIN_ROUNDS, MIN_ROUNDS + 8)
    assert rounds(0.2) == MAX_ROUNDS


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_an_interrupt_keeps_finished_tests(after: int) -> None:
    machine = Machine(1)

    class Interrupted(Backend):
        def measure(self, test: Test) -> Sample:
            if len(self.measured) == after:
                raise KeyboardInterrupt
            return super().measure(test)

    run = session(machine, Interrupted(machine))
    with pytest.raises(KeyboardInterrupt):
        list(run.run())
    assert sum(len(kept) for kept in run.repetitions.values()) == after


def test_a_failing_peer_is_left_out() -> None:
    machine = Machine(1)

    class Failing(Backend):
        engine = "peer"

        def measure(self, test: Test) -> Sample:
            if len(self.measured) == 3:
                raise EngineError("it fell over")
            return super().measure(test)

    run = session(machine, Backend(machine), Failing(machine))
    list(run.run())
    assert {len(kept) for (engine, _, _), kept in run.repetitions.items() if engine == "headrace"} == {3}
    assert sum(len(kept) for (engine, _, _), kept in run.repetitions.items() if engine == "peer") == 3
    assert run.notes == ["peer is left out from round 2 on: it fell over"]


def test_the_time_left_is_without_a_dropped_peer() -> None:
    machine = Machine(1, sd=0)

    class Failing(Backend):
        engine = "peer"

        def measure(self, test: Test) -> Sample:
            if len(self.measured) == 1:
                raise EngineError("it fell over")
            return super().measure(test)

    def left(*backends: Backend) -> list[float | None]:
        return [progress.left_s for progress in session(machine, *backends).run() if progress.round == 2]

    assert left(Backend(machine), Failing(machine, slower=100.0)) == pytest.approx(left(Backend(machine)), rel=0.1)


def test_an_error_of_headrace_ends_the_run() -> None:
    machine = Machine(1)

    class Failing(Backend):
        def warm_up(self, _test: Test) -> None:
            raise EngineError("no")

    with pytest.raises(EngineError):
        list(session(machine, Failing(machine)).run())


def test_repetitions_record_their_start_and_memory_speed() -> None:
    machine = Machine(1)
    run = session(machine, Backend(machine))
    list(run.run())
    kept = [one for many in run.repetitions.values() for one in many]
    assert all(one.memory_gb_s is not None and 30 < one.memory_gb_s < 60 for one in kept)
    began = sorted(one.began_s for one in kept)
    assert all(a < b for a, b in itertools.pairwise(began))


def test_precision_is_the_relative_half_width_of_the_t_interval() -> None:
    assert precision([1.0]) == float("inf")
    # Four values: t of three degrees of freedom, the standard deviation, the root of four.
    assert precision([0.0, 0.02, -0.02, 0.0]) == pytest.approx(3.1824 * 0.016329932 / 2, rel=1e-4)


def entry(engine: str, speeds: list[float], own: list[float | None]) -> Result:
    """Return the result of a test. speeds: measured in each round. own: the engine's own figures of them."""
    repetitions = [repetition_figures(speed, own=said) for speed, said in zip(speeds, own, strict=True)]
    return bench_result(engine=engine, test="tg8", generated_tokens=8, samples=speeds, repetitions=repetitions)


def test_ratios_pair_rounds_and_leave_an_interrupted_one_out() -> None:
    ours = entry("headrace", [20.0, 40.0, 60.0], [None] * 3)
    theirs = entry("peer", [10.0, 20.0], [9.9, 20.2])
    (found,) = ratios([ours, theirs], "peer")
    assert (found.ratio, found.low, found.high, found.pairs) == (2.0, 2.0, 2.0, 2)
    (said,) = agreement([ours, theirs], "peer")
    assert said.measured_over_own == pytest.approx((10 / 9.9 + 20 / 20.2) / 2)
    assert agreement([ours], "headrace") == []


def test_batch_scaling_compares_with_one_sequence_of_the_same_rounds() -> None:
    one = entry("headrace", [10.0, 20.0, 30.0], [None] * 3)
    eight = replace(one, test="tg8 x8", batch=8, samples=[40.0, 80.0])
    deeper = replace(eight, depth=512)
    (found,) = scaling([one, eight, deeper])
    assert (found.test, found.batch, found.pairs) == ("tg8 x8", 8, 2)
    assert found.speedup == Mean(4.0, 4.0, 4.0)
    assert found.step_time == Mean(2.0, 2.0, 2.0)
    (noisy,) = scaling([one, replace(eight, samples=[40.0, 100.0])])
    assert noisy.step_time.low == 8 / noisy.speedup.high < noisy.step_time.high
