"""One repetition of one test, as a backend reports it, and what a backend is.

The definitions of `runtime.metrics.telemetry` hold: decode speed is the inverse of TPOT. A prefill test is over with
its first token, as in llama-bench and mlx-lm: its speed is the prompt's tokens over TTFT. Prompt + generation is all
tokens over all of the time. A batch's speed is that of its sequences together. An arrival's is the prompt's over its
own TTFT, while inter-token latencies are those of the sequences it joined. A workload's is that of decoding with
speculation, of all its sequences from when each has its first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.setup import Setup


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the latencies of an arrival are held against: theirs before it came, and its TTFT with nobody beside it."""

    before_s: Sequence[float]
    alone_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """How a workload was answered, by all its sequences together, from when each of them had its first token.

    tokens, seconds: of that time. steps: each sequence's counts. proposed, accepted: guesses that were verified, and
    those of them that were right. tried: those of them before which no other of its step was wrong, itself included.
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


@dataclass(frozen=True, slots=True)
class Pair:
    """A workload answered with speculation and right before or after it without.

    same: whether both said the same tokens. sources: what guessed.
    """

    on: Answered
    off: Answered
    same: bool
    sources: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Clock readings of one repetition; bytes and FLOPs are of the average step, None where nobody counts them.

    latencies_s: inter-token latencies; of a batch, those of one sequence, while bytes and FLOPs are those of all.
    first_step_s: from the end of prefill to the first token. own_tokens_per_second: what a peer says about itself, to
    hold our measurement of it against. prompt_tokens: of a workload.
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

    @property
    def decode_s(self) -> float:
        return sum(self.latencies_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_step_s is None else self.prefill_s + self.first_step_s

    def tokens_per_second(self, test: Test) -> float:
        """The test's speed; see the module's definitions."""
        if test.kind in ("prefill", "arrival"):
            return test.prompt / (self.ttft_s or self.prefill_s)
        if self.pair is not None:
            return self.pair.on.tokens_per_second
        if test.kind == "workload":  # a peer's: a latency for every token
            return len(self.latencies_s) / self.decode_s
        if test.kind == "decode":
            return test.batch * len(self.latencies_s) / self.decode_s
        return (test.prompt + test.generate) / (self.prefill_s + (self.first_step_s or 0.0) + self.decode_s)


@dataclass(frozen=True, slots=True)
class Repetition:
    """A sample with its circumstances: when it began (seconds into the run), and how fast memory was around it."""

    sample: Sample
    began_s: float
    memory_gb_s: float | None


class Backend(Protocol):
    """Something that can be measured: our engine with one model, or another implementation with the same weights."""

    engine: str
    """Whose implementation: `headrace`, `mlx-lm`, `llama.cpp`."""
    model: str
    setup: Setup
    """What it was given, in its own words."""

    def warm_up(self, test: Test) -> None:
        """Whatever must happen before the first repetition counts: kernels compiled, depth in the cache."""
        ...

    def measure(self, test: Test) -> Sample:
        """One repetition."""
        ...

    def close(self) -> None: ...
