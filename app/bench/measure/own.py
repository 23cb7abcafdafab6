"""headrace's own engine as a benchmark backend.

`OwnEngine` is a `sample.Backend`, as the peers are. `measure` chooses by the kind of the test: a workload (`pair.py`),
an arrival (`arrival.py`), a batch, or one sequence.

Requests are greedy, but for workloads at temperature 1. For tests of one sequence each depth has an engine whose prefix
stays in the cache and is trimmed back before each repetition, where the cache allows it. A test feeds fresh random
tokens, so the prefix cache finds nothing else.

Guard: tests/app/bench/measure/test_own.py.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from headrace.app.bench.measure.arrival import measure_arrival
from headrace.app.bench.measure.pair import WorkloadPrompt, measure_pair
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Finished, Request, SequenceFailed, Step
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.errors import EngineError
from headrace.runtime.machine.energy import EnergyMeter
from headrace.runtime.machine.sensors import Readings, Sensors
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import RankTimes, StepRecord, Summary
from headrace.runtime.network import Network
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import Speculation

_TIMED_EVERY = 8  # steps of which one is timed by part, on several machines


class OwnEngine:
    """One network as a backend. It makes engines as tests need them, and keeps them until `close`."""

    engine = "headrace"

    def __init__(
        self,
        model: str,
        network: Network,
        *,
        limit: int,
        setup: EngineSetup | None = None,
        other_bytes: int = 0,
        questions: Mapping[str, WorkloadPrompt] | None = None,
        draft: Network | None = None,
        sensors: Sensors = Readings,
    ) -> None:
        """Take the network of `model`.

        limit: largest number of prompt and generated tokens in any test.
        setup: threads and settings, for the document.
        other_bytes: bytes that MLX holds for other purposes, left out of a test's peak.
        questions: workloads by name.
        draft: model that proposes tokens for workloads; None: n-grams do.
        sensors: energy counters of the machine; by default none.
        """
        self.model = model
        self._sensors = sensors
        self.setup = setup or EngineSetup(self.engine, model)
        self.cost: StepCost = network.cost
        self._network = network
        self._limit = limit
        self._random = random.Random(0)
        self._prefix = self._tokens(limit)  # a test of depth n has its first n tokens in the cache
        self._first_token = 0  # first token of the newest test
        self._engines_by_depth: dict[int, Engine] = {}
        self._engines_by_batch: dict[int, Engine] = {}  # by the most sequences that run together
        self._cache_bytes_by_depth: dict[int, int] = {}  # of the caches that stay
        self._other_bytes = other_bytes
        self._questions = questions or {}
        self._draft = draft
        self.rank_times: list[tuple[RankTimes, ...]] = []
        """Times by rank of the decode steps that have them, one of _TIMED_EVERY; empty on one machine."""
        self.first_pass_report: Callable[[float], None] | None = None
        """Takes the seconds of a first pass that takes long; to be set before the first test."""
        self._num_pairs: Counter[Test] = Counter()  # measured of each workload
        self._workload_engines_by_batch: dict[int, Engine] = {}  # prompts and pass costs stay in them

    def warm_up(self, test: Test) -> None:
        """Fill the cache to the test's depth and run a short form of the test."""
        self.measure(test.short)

    def measure(self, test: Test) -> Sample:
        """Measure one repetition. The first step feeds the last prompt token."""
        if test.kind == "workload":
            return self._measure_workload(test)
        if test.kind == "arrival":
            engine = self._engine_of_batch(test.batch + 1)  # with room for the joining prompt
            return measure_arrival(engine, test, self._prompts(test), self._tokens)
        if test.batch > 1:
            return self._measure_batch(test)

        # One sequence: bring the cache to the test's depth, then feed fresh tokens and decode.
        engine = self._engine_of_depth(test.depth)
        before = self._prefix[: test.depth]
        if before:
            # Leaves exactly `before` tokens in the cache: one step if it can be trimmed, a whole prefill if not.
            _follow(engine.generate(Request(before, max_tokens=1, speculate="off")))
        fed = self._fresh(max(test.prompt, 1))
        meter = EnergyMeter(self._sensors)
        follow = engine.generate(Request([*before, *fed], max_tokens=test.generate or 1, speculate="off"))
        steps, summary = _follow(follow, meter.restart if test.kind == "decode" else None)
        energy = meter.use()
        if summary.prefill_tokens != len(fed) - 1:
            raise EngineError(f"{test.label}: the cache lost its {test.depth} tokens")

        # Memory of other models, and of the prefixes that stay for other depths, is not the test's.
        other_depths = [size for depth, size in self._cache_bytes_by_depth.items() if depth != test.depth]
        others = self._other_bytes + sum(other_depths)
        if test.depth:  # without, no prefix stays in the cache
            self._cache_bytes_by_depth[test.depth] = steps[-1].kv_allocated_bytes
        decode = steps[1:]
        self.rank_times += [step.ranks for step in decode if step.ranks]
        return Sample(
            prefill_s=summary.prefill_s,
            first_step_s=steps[0].latency_s,
            latencies_s=[step.latency_s for step in decode],
            weight_bytes=_mean([step.weight_bytes for step in decode]),
            kv_bytes=_mean([step.kv_bytes_read + step.kv_bytes_written for step in decode]),
            flops=_mean([self.cost.step_flops(step.context - 1) for step in decode]),
            peak_memory_bytes=max(0, summary.peak_memory_bytes - others),
            energy=energy,
        )

    def _measure_batch(self, test: Test) -> Sample:
        """Measure several sequences with separate tokens, from the step in which all decode."""
        engine = self._engine_of_batch(test.batch)
        sequences = [engine.submit(Request(prompt, speculate="off")) for prompt in self._prompts(test)]
        begun: set[EngineSequence] = set()
        steps: list[StepRecord] = []  # of the first sequence, once all decode
        meter: EnergyMeter | None = None
        while len(steps) < test.generate - 1:
            all_decode = len(begun) == test.batch
            if all_decode and meter is None:
                meter = EnergyMeter(self._sensors)
            for sequence, event in engine.step():
                if isinstance(event, Finished | SequenceFailed):
                    raise EngineError(f"{test.label}: a sequence ended before the others started")
                if isinstance(event, Step):
                    begun.add(sequence)
                    if all_decode and sequence is sequences[0]:
                        steps.append(event.record)
        assert meter is not None, "a decode test has at least two tokens"
        energy = meter.use()

        # End all, so that the engine is empty for the next repetition.
        for sequence in sequences:
            engine.cancel(sequence)
        while engine.has_work:
            engine.step()
        others = self._other_bytes + sum(self._cache_bytes_by_depth.values())
        return Sample(
            prefill_s=0.0,
            first_step_s=None,  # all sequences have their first token before the clock starts
            latencies_s=[step.latency_s for step in steps],
            # If not all fit into one pass, weights are read once per pass.
            weight_bytes=_mean([step.weight_bytes * test.batch // step.batch for step in steps]),
            kv_bytes=_mean([test.batch * (step.kv_bytes_read + step.kv_bytes_written) for step in steps]),
            flops=_mean([test.batch * self.cost.step_flops(step.context - 1) for step in steps]),
            peak_memory_bytes=max(0, max(step.peak_memory_bytes for step in steps) - others),
            energy=energy,
        )

    def _measure_workload(self, test: Test) -> Sample:
        """Measure a workload with and without speculation; its prompt is in the cache."""
        if test.batch not in self._workload_engines_by_batch:
            engine = Engine(
                self._network,
                context_limit=self._limit,
                keep_prefix=True,
                max_running=test.batch,
                draft=self._draft,
                pass_costs=PassCostStore(self.cost),
            )
            self._watch(engine)
            self._workload_engines_by_batch[test.batch] = engine
        self._num_pairs[test] += 1
        speculation: Speculation = "draft"
        if self._draft is None:
            speculation = "auto"
        sample = measure_pair(
            self._workload_engines_by_batch[test.batch],
            test,
            self._questions[test.workload],
            self._num_pairs[test],
            speculation,
        )
        self.rank_times += sample.ranks
        peak = max(0, (sample.peak_memory_bytes or 0) - self._other_bytes)
        return replace(sample, peak_memory_bytes=peak)

    def _engine_of_batch(self, batch: int) -> Engine:
        if batch not in self._engines_by_batch:
            engine = Engine(self._network, context_limit=self._limit, max_running=batch)
            engine.first_pass.report = self.first_pass_report
            self._engines_by_batch[batch] = engine
        return self._engines_by_batch[batch]

    def _prompts(self, test: Test) -> list[list[int]]:
        """Return a prompt for each sequence: `depth` tokens, which no other has, and a fresh one.

        They are computed before the clock starts.
        """
        bases = [random.Random(number) for number in range(test.batch)]
        prompts = [[draw.randrange(self._network.vocab_size) for _ in range(test.depth)] for draw in bases]
        return [[*prompt, *self._tokens(1)] for prompt in prompts]

    def close(self) -> None:
        self._engines_by_depth.clear()
        self._engines_by_batch.clear()
        self._workload_engines_by_batch.clear()

    def _engine_of_depth(self, depth: int) -> Engine:
        if depth not in self._engines_by_depth:
            engine = Engine(self._network, context_limit=self._limit, keep_prefix=depth > 0)
            self._watch(engine)
            self._engines_by_depth[depth] = engine
        return self._engines_by_depth[depth]

    def _watch(self, engine: Engine) -> None:
        """Have a new engine report a slow first pass and, on several machines, times by rank."""
        engine.first_pass.report = self.first_pass_report
        if self._network.division is not None:
            engine.timer.every = _TIMED_EVERY

    def _fresh(self, count: int) -> list[int]:
        """Return random tokens, so that no cached prefix matches.

        The first one began no earlier test, until every token of the vocabulary has.
        """
        self._first_token = (self._first_token + 1) % self._network.vocab_size
        return [self._first_token, *self._tokens(count - 1)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._network.vocab_size) for _ in range(count)]


def _follow(events: Iterator[Event], on_first: Callable[[], None] | None = None) -> tuple[list[StepRecord], Summary]:
    """Return the steps and the summary. on_first: called at the first step."""
    steps: list[StepRecord] = []
    for event in events:
        if isinstance(event, Step):
            if on_first is not None and not steps:
                on_first()
            steps.append(event.record)
        elif isinstance(event, Finished):
            return steps, event.summary
    raise AssertionError("a generation ends with Finished")


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None
