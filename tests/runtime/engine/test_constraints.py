"""Constrained sequences: only allowed tokens, the same alone, in a batch and with draft tokens; others lose nothing."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine import engine as engines
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.in_flight import SelectedPass
from headrace.runtime.engine.request import Finished, Request, SequenceFailed, Step
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.sampling.params import SamplingParams
from tests.support.speculating import oracle, run, speculating
from tests.support.tiny import VOCAB

STOP = 95
SAMPLED = SamplingParams(temperature=1.5, top_k=50, seed=4, repetition_penalty=1.3)


class Steps:
    """Tokens rise by 1 to 5, twice freely and twice by 3; STOP ends at any place from the eighth on."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def start(self) -> "Steps":
        return Steps()

    def _row(self, tokens: Sequence[int]) -> list[bool]:
        last = tokens[-1] if tokens else 0
        count = len(tokens)
        rises = [3] if count % 4 > 1 else range(1, 6)
        row = [False] * VOCAB
        for rise in rises:
            row[(last + rise) % STOP] = True
        row[STOP] = count >= 8
        return row

    def masks(self, draft_tokens: Sequence[int]) -> mx.array:
        right = self.allowed(draft_tokens)
        rows = [self._row([*self.accepted, *draft_tokens[:place]]) for place in range(right + 1)]
        return mx.array(rows + [[True] * VOCAB] * (len(draft_tokens) - right))

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._row(self.accepted)[token]:
                raise EngineError("not allowed")
            self.accepted.append(token)

    def allowed(self, draft_tokens: Sequence[int]) -> int:
        tokens = list(self.accepted)
        for place, token in enumerate(draft_tokens):
            if not self._row(tokens)[token]:
                return place
            tokens.append(token)
        return len(draft_tokens)

    def forced(self) -> Sequence[int]:
        found: list[int] = []
        while sum(row := self._row([*self.accepted, *found])) == 1:
            found.append(row.index(True))
        return found


def _request(number: int, **changes: Any) -> Request:
    prompt = [(7 * i + 5 * number + 1) % 90 for i in range(5 + number)]
    request = Request(prompt, max_tokens=40, stop_ids=frozenset({STOP}), grammar=Steps(), speculate="off")
    return replace(request, **changes)


REQUESTS = [
    _request(0),
    _request(1, sampling=SAMPLED),
    _request(2, grammar=None),
    _request(3, speculate="ngram"),
    _request(4, sampling=replace(SAMPLED, seed=9), logprobs=2),
    _request(5, grammar=None, sampling=SAMPLED),
]


def _tokens(events: list[Any]) -> list[int]:
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


def _check(request: Request, events: list[Any]) -> None:
    assert isinstance(events[-1], Finished)
    if request.grammar is not None:
        Steps().accept(_tokens(events))


@pytest.fixture(scope="module")
def alone(either: Decoder) -> list[list[int]]:
    found = []
    for request in REQUESTS:
        [events] = run(Engine(either, context_limit=256), [request])
        _check(request, events)
        found.append(_tokens(events))
    assert any(tokens != sorted(tokens) for tokens in found)
    return found


@pytest.mark.sampled
def test_batching_does_not_change_constrained_output(either: Decoder, alone: list[list[int]]) -> None:
    together = run(Engine(either, context_limit=256), REQUESTS)
    assert [_tokens(events) for events in together] == alone


@pytest.mark.sampled
def test_draft_tokens_leave_constrained_output_unchanged(either: Decoder, alone: list[list[int]]) -> None:
    """Right ones, wrong ones that are allowed or not, and forced ones."""
    for requests in ([request] for request in REQUESTS):
        expected = alone[REQUESTS.index(requests[0])]
        for wrong in (frozenset[int](), frozenset({2, 5}), frozenset(range(40))):
            proposer = oracle(requests[0].prompt, expected, wrong)
            assert [_tokens(events) for events in run(speculating(either), requests, [proposer])] == [expected]
    together = run(speculating(either), REQUESTS)
    assert [_tokens(events) for events in together] == alone


def test_several_forced_tokens_are_emitted_per_step(either: Decoder, alone: list[list[int]]) -> None:
    [events] = run(speculating(either), REQUESTS[:1])
    steps = [event for event in events if isinstance(event, Step)]
    sources = {step.record.source for step in steps}
    assert _tokens(events) == alone[0]
    assert sources == {None, "grammar"}
    assert len(steps) < len(alone[0])
    assert sum(step.record.accepted for step in steps) == sum(step.record.proposed for step in steps) > 0


def test_forced_tokens_are_drafted_after_an_unread_token(either: Decoder) -> None:
    """All tokens are forced: one pass for many of them, without waiting for each."""

    class Counting(Steps):
        def start(self) -> "Counting":
            return Counting()

        def _row(self, tokens: Sequence[int]) -> list[bool]:
            last = tokens[-1] if tokens else 0
            return [index == (last + 1 if len(tokens) < 30 else STOP) for index in range(VOCAB)]

        def forced(self) -> Sequence[int]:
            at = len(self.accepted)
            return [*range(at + 1, 31), STOP]

    [events] = run(speculating(either), [_request(0, grammar=Counting())])
    assert _tokens(events) == list(range(1, 31))
    assert events[-1].stop_id == STOP
    assert events[-1].summary.steps <= 6


def test_unconstrained_sequences_run_a_step_ahead(either: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with a constrained sequence is built before the one before it is read."""
    ahead: list[bool] = []
    start = engines.start

    def watched(*arguments: Any) -> Any:
        in_flight = start(*arguments)
        ahead.append(in_flight.is_ahead)
        is_selected = any(isinstance(each, SelectedPass) for each in in_flight.passes)
        assert in_flight.is_constrained != is_selected or not in_flight.chooses
        return in_flight

    monkeypatch.setattr(engines, "start", watched)
    run(Engine(either, context_limit=256), REQUESTS[:3])
    assert ahead.count(False) <= 6  # the prompts' passes, and the ends
    assert ahead.count(True) > 20


def test_a_constraint_that_fails_ends_its_sequence_alone(either: Decoder, alone: list[list[int]]) -> None:
    class Failing(Steps):
        def start(self) -> "Failing":
            return Failing()

        def masks(self, draft_tokens: Sequence[int]) -> mx.array:
            if len(self.accepted) > 5:
                raise EngineError("the grammar is too complex")
            return super().masks(draft_tokens)

    failed, other = run(Engine(either, context_limit=256), [_request(0, grammar=Failing()), REQUESTS[1]])
    assert isinstance(failed[-1], SequenceFailed)
    assert "too complex" in str(failed[-1].error)
    assert _tokens(failed) == alone[0][:6]
    assert _tokens(other) == alone[1]


def test_a_bias_against_all_allowed_tokens_is_an_error(either: Decoder) -> None:
    """No token that is not allowed comes out, whatever the bias."""
    first = REQUESTS[0].grammar.start().masks([])[0].tolist()
    bias = {index: float("-inf") for index in range(VOCAB) if first[index]}
    [events] = run(Engine(either, context_limit=256), [_request(0, sampling=SamplingParams(logit_bias=bias))])
    assert isinstance(events[-1], SequenceFailed)
    assert isinstance(events[-1].error, UsageError)
    assert "forbids every token that the grammar allows" in str(events[-1].error)
    wanted = run(
        Engine(either, context_limit=256), [_request(0, sampling=SamplingParams(logit_bias={50: float("inf")}))]
    )
    _check(REQUESTS[0], wanted[0])


@pytest.mark.sampled
def test_a_preempted_sequence_keeps_its_state(either: Decoder, alone: list[list[int]]) -> None:
    engine = Engine(either, context_limit=256)
    sequences = [engine.submit(request) for request in REQUESTS]
    tokens: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
    for step in range(1000):
        if not engine.has_work:
            break
        if step % 7 == 5:
            engine.preempt_youngest()
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
    assert [tokens[sequence] for sequence in sequences] == alone
