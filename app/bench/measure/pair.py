"""A workload answered with and without speculation: the speed-up, and a check for changed tokens.

One repetition holds both, in alternating order, so that drift affects both. Each is a whole answer; the clock starts
when every sequence has its first token, so prompts do not count.

Guard: tests/app/bench/test_speculation.py.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Answered, Pair, Sample
from headrace.app.bench.measure.workloads import load_workloads
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request, SequenceFailed, Step
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.errors import EngineError
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.speculation.proposer import Speculation

if TYPE_CHECKING:
    from headrace.models.loading.load import LoadedModel

MIN_ANSWER = 8  # tokens; shorter answers are not measured
_TRIES = 8  # seeds tried before an error


class WorkloadPrompt(Struct, frozen=True):
    """A workload's prompt tokens for one model, and its stop ids."""

    prompt: Sequence[int]
    stop_ids: frozenset[int]


def questions(model: "LoadedModel", tests: Sequence[Test]) -> dict[str, WorkloadPrompt]:
    """Encode the tests' workloads for the model. Raises UsageError for a model without a chat template."""
    names = dict.fromkeys(test.workload for test in tests if test.workload)
    if not names:
        return {}
    prompts = ChatPrompt(model.tokenizer)
    workloads = load_workloads()
    return {name: WorkloadPrompt(prompts.encode(workloads[name].messages), model.tokenizer.eos_ids) for name in names}


class _Run(Struct):
    """A workload's answer by all sequences of a batch; filled while it is generated."""

    tokens: list[list[int]]  # of each sequence
    records: list[StepRecord] = field(default_factory=list)  # of the steps that count
    seconds: float = 0.0  # of these steps
    latencies_s: list[float] = field(default_factory=list)  # of the first sequence

    @property
    def counted(self) -> int:
        """Tokens of the counted steps, end-of-turn tokens included."""
        return sum(record.tokens for record in self.records)

    def answered(self) -> Answered:
        """Return the figures of the counted steps."""
        # Steps with a rejected draft token: the first rejected one was tried, those after it were not.
        rejecting = sum(record.accepted < record.proposed for record in self.records)
        accepted = sum(record.accepted for record in self.records)
        return Answered(
            tokens=self.counted,
            seconds=self.seconds,
            steps=len(self.records),
            proposed=sum(record.proposed for record in self.records),
            accepted=accepted,
            tried=accepted + rejecting,
        )


def measure_pair(engine: Engine, test: Test, question: WorkloadPrompt, turn: int, way: Speculation = "auto") -> Sample:
    """Answer the question with and without speculation. Raises EngineError for answers shorter than MIN_ANSWER tokens.

    test: batch, length and temperature of the answers.
    turn: number of the repetition, which determines the seeds and which of the two comes first.
    way: the kind of speculation that is compared with none.
    """
    if turn % 2:
        order: tuple[Speculation, Speculation] = (way, "off")
    else:
        order = ("off", way)
    for attempt in range(_TRIES):
        # Sequences of a batch have the seeds from this one on, which may be those of another attempt. That changes no
        # figure: both modes have the same seeds, and no run drafts from the answers of another (`_answer`).
        seed = 1 + turn * _TRIES + attempt
        runs = {speculates: _answer(engine, test, question, seed, speculates) for speculates in order}
        on = runs[way]
        off = runs["off"]
        if min(on.counted, off.counted) >= MIN_ANSWER:
            break
    else:
        raise EngineError(f"{test.label}: the model's answers are too short to measure")
    return Sample(
        prefill_s=0.0,
        first_step_s=None,
        latencies_s=on.latencies_s,
        weight_bytes=_mean([record.weight_bytes * test.batch // record.batch for record in on.records]),
        kv_bytes=test.batch * _mean([record.kv_bytes_read + record.kv_bytes_written for record in on.records]),
        peak_memory_bytes=max(record.peak_memory_bytes for record in on.records),
        prompt_tokens=len(question.prompt),
        ranks=[record.ranks for record in on.records if record.ranks],
        pair=Pair(
            on.answered(),
            off.answered(),
            same=on.tokens == off.tokens,
            sources=tuple(sorted({record.source for record in on.records if record.source})),
        ),
    )


def _answer(engine: Engine, test: Test, question: WorkloadPrompt, seed: int, speculate: Speculation) -> _Run:
    """Run the test's sequences, each with its own seed, until all have finished."""
    # The other mode has just given the same answers: drafting from them would accept nearly every token.
    engine.forget_answers()
    sequences = [engine.submit(_request(test, question, seed + number, speculate)) for number in range(test.batch)]
    outputs: dict[EngineSequence, list[int]] = {sequence: [] for sequence in sequences}
    run = _Run(list(outputs.values()))
    waiting = set(sequences)  # for the first token
    running = set(sequences)  # until the last
    # Steps count once every sequence has its first token: the steps until then also prefill.
    began = time.perf_counter()
    ended = began
    while running:
        counts = not waiting
        for sequence, event in engine.step():
            record: StepRecord | None = None
            if isinstance(event, Step):
                outputs[sequence] += event.tokens
                record = event.record
            elif isinstance(event, Finished):
                running.discard(sequence)
                record = event.stop_record
            elif isinstance(event, SequenceFailed):
                raise event.error
            if record is None:
                continue
            waiting.discard(sequence)
            if counts:
                run.records.append(record)
                if sequence is sequences[0]:
                    run.latencies_s.append(record.latency_s)
        ended = time.perf_counter()
        if not counts and not waiting:
            began = ended
    while engine.has_work:
        engine.step()
    run.seconds = ended - began
    return run


def _request(test: Test, question: WorkloadPrompt, seed: int, speculate: Speculation) -> Request:
    return Request(
        question.prompt,
        max_tokens=test.generate,
        sampling=SamplingParams(temperature=test.temperature, seed=seed),
        stop_ids=question.stop_ids,
        speculate=speculate,
    )


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
