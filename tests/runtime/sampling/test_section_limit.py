"""Limit on a section of the output: its end is forced after a budget, on real engines at the exact token."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine import sequence as engine_sequence
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.section_limit import SectionLimit

OPEN = (1, 2)
CLOSE = (7, 8, 9)


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    """With K/V in buffers, and in blocks."""
    return either


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([], None),
        ([1, 2, 3, 3, 3], None),  # within the budget
        ([1, 2, 3, 3, 3, 3], 7),
        ([1, 2, 3, 3, 3, 3, 7], 8),
        ([1, 2, 3, 3, 3, 7], 8),  # the model had begun its end
        ([1, 2, 3, 3, 3, 7, 8], 9),
        ([1, 2, 3, 3, 7, 8, 9, 3, 3], None),  # it is over
        ([1, 2, 3, 3, 3, 3, 7, 8, 9], None),
        ([4, 1, 2, 3, 3, 3, 3], 7),  # a token before it
        ([3] * 20, None),  # it never began
        ([3] * 20 + [1, 2, 3, 3, 3, 3, 3], None),  # nor later
    ],
)
def test_the_closing_tokens_of_thinking_are_forced_at_the_limit(output: list[int], forced: int | None) -> None:
    assert SectionLimit(4, OPEN, CLOSE).forced(output) == forced


def test_the_thinking_limit_counts_from_a_section_begun_by_the_prompt() -> None:
    limit = SectionLimit(2, (), (7,))
    assert limit.forced([3]) is None
    assert limit.forced([3, 3]) == 7
    assert limit.over([7])
    assert not limit.over([3, 3])


def output(engine: Engine, request: Request) -> tuple[int, ...]:
    return tuple(token for event in engine.generate(request) if isinstance(event, Step) for token in event.tokens)


def expected(free: Sequence[int], budget: int) -> tuple[int, ...]:
    return (*free[:budget], *CLOSE)


@pytest.mark.sampled
@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)])
def test_the_engine_ends_thinking_at_the_exact_token(network: Decoder, params: SamplingParams, speculate: str) -> None:
    engine = Engine(network, context_limit=200)
    bias = dict.fromkeys(CLOSE, -100.0)  # they come by force alone
    sampling = SamplingParams(temperature=params.temperature, seed=params.seed, logit_bias=bias)
    free = output(engine, Request([5, 6, 5, 6], 40, sampling, speculate=speculate))  # type: ignore[arg-type]
    for budget in (1, 2, 13):
        limit = SectionLimit(budget, (), CLOSE)
        limited = output(engine, Request([5, 6, 5, 6], 40, sampling, speculate=speculate, section=limit))  # type: ignore[arg-type]
        assert len(limited) == 40
        assert limited[: budget + len(CLOSE)] == expected(free, budget)
        assert not set(CLOSE) & {*limited[budget + len(CLOSE) :]}


@pytest.mark.sampled
def test_a_thinking_limit_does_not_change_other_sequences_of_the_batch(network: Decoder) -> None:
    engine = Engine(network, context_limit=200)
    plain = Request([5, 6, 7], 30)
    limit = SectionLimit(6, (), CLOSE)
    alone = output(engine, plain), output(engine, Request([9, 8], 30, section=limit))
    sequences = [engine.submit(plain), engine.submit(Request([9, 8], 30, section=limit))]
    together: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    while engine.has_work:
        for sequence, event in engine.step():
            if isinstance(event, Step):
                together[sequences.index(sequence)] += event.tokens
    assert (together[0], together[1]) == alone


@pytest.mark.parametrize(("is_allowed", "forced"), [(True, 9), (False, None)])
def test_thinking_is_not_ended_within_a_character_of_a_grammar(is_allowed: bool, forced: int | None) -> None:
    """Otherwise the answer would leave its grammar: a character can have several tokens."""
    seen: list[int | None] = []
    sequence = SimpleNamespace(
        section=SectionLimit(2, (), (9,)),
        sampler=SimpleNamespace(force=seen.append),
        constraint=SimpleNamespace(allowed=lambda tokens: len(tokens) if is_allowed else 0),
        request=SimpleNamespace(prompt=(1,)),
        tokens=[1, 5, 6],
        may_force=lambda _: True,
    )
    engine_sequence.Sequence.force_next(cast(Any, sequence))
    assert seen == [forced]
