"""Samples of a benchmark and the backend protocol.

Definitions are those of `runtime.metrics.telemetry`: decode speed is 1 / TPOT. A prefill test ends with its first
token: its speed is prompt tokens / TTFT, as in llama-bench and mlx-lm. Prompt + generation: all tokens over the whole
time. Batch: the total of its sequences. Arrival: the prompt's tokens over its TTFT; latencies are those of the
sequences it joined. Workload: decoding with speculation, all sequences, from when each has its first token.

Guard: tests/app/bench/test_speculation.py for workloads.
"""

from collections.abc import Sequence
from statistics import median
from typing import Protocol

from msgspec import Struct

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.setup import EngineSetup
from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.machine_load import CPUUse
from headrace.runtime.metrics.telemetry import RankTimes


class Arrival(Struct, frozen=True):
    """Baselines of an arrival: the others' latencies before it, and its TTFT alone."""

    before_s: Sequence[float]
    alone_s: float


class Answered(Struct, frozen=True):
    """A workload's answer by all its sequences, from when each has its first token.

    tokens, seconds: of that time.
    steps: summed over sequences.
    proposed: draft tokens that were verified.
    accepted: of them, accepted ones.
    tried: of them, those whose predecessors in the step were all accepted.
    """

    tokens: int
    seconds: float
    steps: int
    proposed: int = 0
    accepted: int = 0
    tried: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Pair(Struct, frozen=True):
    """A workload answered with and without speculation."""

    on: Answered  # with speculation
    off: Answered
    same: bool  # both gave the same tokens
    sources: Sequence[str] = ()  # the proposers used


class Sample(Struct, frozen=True):
    """Clock readings of one repetition.

    The kind of its test tells which fields have a value:

        kind      prefill_s  first_step_s     latencies_s                  besides
        prefill   prompt     first token      none
        both      prompt     first token      steps after it
        decode    0          None             steps of the batch
        arrival   TTFT       0                the others', concatenated    arrival
        workload  0          None             steps with speculation       prompt_tokens, pair

    Of a peer's prefill, `first_step_s` may be None, and `pair` of its workload is. Counted bytes and FLOPs, memory and
    energy are each None where they are unknown. tests/app/bench/measure/test_own.py and test_speculation.py guard this.

    prefill_s: of the prompt without its last token.
    first_step_s: from the end of prefill to the first token; 0 if `prefill_s` has it, None without a first token.
    latencies_s: inter-token latencies, in a batch those of one sequence.
    weight_bytes, kv_bytes, flops: of the average step, of all its sequences; None if not counted.
    peak_memory_bytes: of the test alone; None if unknown.
    own_tokens_per_second: a peer's own figure, to check ours.
    arrival: baselines of an arrival; None for other tests.
    prompt_tokens: of a workload; None for other tests.
    pair: a workload's answers with and without speculation; None for other tests, and of peers.
    energy: of the machine during the tokens that the speed counts; None if unknown.
    ranks: times by rank of timed steps, on several machines.
    """

    prefill_s: float
    first_step_s: float | None
    latencies_s: Sequence[float]
    weight_bytes: float | None = None
    kv_bytes: float | None = None
    flops: float | None = None
    peak_memory_bytes: int | None = None
    own_tokens_per_second: float | None = None
    arrival: Arrival | None = None
    prompt_tokens: int | None = None
    pair: Pair | None = None
    energy: EnergyUse | None = None
    ranks: Sequence[tuple[RankTimes, ...]] = ()

    @property
    def decode_s(self) -> float:
        return sum(self.latencies_s)

    @property
    def ttft_s(self) -> float | None:
        if self.first_step_s is None:
            return None
        return self.prefill_s + self.first_step_s

    def tokens(self, test: Test) -> int:
        """Return the tokens that the speed of a prefill, a decode or both counts."""
        if test.kind == "decode":
            return test.batch * len(self.latencies_s)
        return test.prompt + test.generate

    def tokens_per_second(self, test: Test) -> float:
        """Return the test's speed as defined in the module docstring."""
        if test.kind in ("prefill", "arrival"):
            # A peer's child may not have measured its first step: then its prefill alone counts.
            return test.prompt / (self.ttft_s or self.prefill_s)
        if self.pair is not None:
            return self.pair.on.tokens_per_second
        if test.kind == "workload":  # a peer's: a latency for every token
            return len(self.latencies_s) / self.decode_s
        if test.kind == "decode":
            return self.tokens(test) / self.decode_s
        return self.tokens(test) / (self.prefill_s + (self.first_step_s or 0.0) + self.decode_s)


class Repetition(Struct, frozen=True):
    """A sample, its start in seconds into the run, and the memory bandwidth around it.

    cpu_use: of the machine meanwhile; None if unknown, and for peers, which are processes of their own.
    """

    sample: Sample
    began_s: float
    memory_gb_s: float | None
    cpu_use: CPUUse | None = None


class Backend(Protocol):
    """An engine to measure: ours with one model, or a peer with the same weights."""

    engine: str
    """`headrace`, or a peer's name: `mlx-lm`, `llama.cpp`."""
    model: str
    setup: EngineSetup
    """Threads and settings it reports."""

    def warm_up(self, test: Test) -> None:
        """Prepare the first repetition: compile kernels, fill the cache."""
        ...

    def measure(self, test: Test) -> Sample:
        """Measure one repetition."""
        ...

    def close(self) -> None: ...


def typical_speed(test: Test, sample: Sample) -> float:
    """Return tokens per second of the median step for a decode test, of the whole test otherwise."""
    if test.kind == "decode":
        return test.batch / median(sample.latencies_s)
    return sample.tokens_per_second(test)
