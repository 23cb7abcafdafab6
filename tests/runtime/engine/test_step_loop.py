"""The decode loop's semantics: one entry per layer and step, no token computed before the one it follows, and of the
step built ahead nothing but the entry of the last token read, whatever ended the answer."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag, Event, Finished, Request, Step
from headrace.runtime.errors import EngineError
from headrace.runtime.sampling.params import SamplingParams
from tests.support.alone import new_cache
from tests.support.watched import WatchedNetwork, answer, committed, same_rows, step_by_step

PROMPT = [5, 17, 3, 88, 42, 9, 61]
STEPS = 12


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    """With K/V in buffers, and in blocks."""
    return either


def recomputed(network: Decoder, prompt: list[int], steps: int) -> list[int]:
    """Greedy tokens without any reuse: a fresh cache and the whole sequence for every token."""
    tokens = list(prompt)
    for _ in range(steps):
        cache = new_cache(network, len(tokens))
        cache.reserve(len(tokens))
        logits = network.logits(network.layers(network.embed(mx.array([tokens])), cache))
        tokens.append(int(mx.argmax(logits).item()))
    return tokens[len(prompt) :]


def test_tokens_are_those_of_full_recompute(network: Decoder) -> None:
    tokens, end = answer(network, Request(PROMPT, max_tokens=STEPS))
    assert tokens == recomputed(network, PROMPT, STEPS)
    assert end.reason == "length"


def test_a_step_appends_one_kv_entry_to_every_layer(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    tokens, _ = answer(watched, Request(PROMPT, max_tokens=STEPS))
    fed = [token for batch in watched.fed for token in batch[0].tolist()]
    assert fed == [*PROMPT, *tokens[:-1]]  # each token exactly once, in order; the last is never fed
    prefill, *steps = watched.fed
    assert prefill.shape == (1, len(PROMPT) - 1)
    assert [step.shape for step in steps] == [(1, 1)] * STEPS
    layers = len(network.config.layers)
    decode_calls = watched.attended[layers:]
    assert decode_calls == [(layer, 1) for _ in range(STEPS) for layer in range(layers)]
    assert committed(watched.caches[0]) == len(PROMPT) - 1 + STEPS


def test_each_step_reads_all_entries_before_it_and_at_most_one_is_uncommitted(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    answer(watched, Request(PROMPT, max_tokens=STEPS))
    lengths = [length for length, _ in watched.positions[1:]]
    assert lengths == list(range(len(PROMPT) - 1, len(PROMPT) - 1 + STEPS))
    assert {length - committed for length, committed in watched.positions} == {0, 1}


def test_steps_are_built_ahead_on_caches_that_cannot_roll_back_too(network: Decoder) -> None:
    watched = WatchedNetwork(network, forgets=True)
    tokens, _ = answer(watched, Request(PROMPT, max_tokens=STEPS))
    assert {length - committed for length, committed in watched.positions[2:]} == {1}
    assert tokens == step_by_step(network, PROMPT, STEPS)[0]


def by_length(network: WatchedNetwork, tokens: list[int]) -> Iterator[Event]:
    return Engine(network, context_limit=256).generate(Request(PROMPT, max_tokens=len(tokens)))


def by_stop_id(network: WatchedNetwork, tokens: list[int]) -> Iterator[Event]:
    return Engine(network, context_limit=256).generate(Request(PROMPT, stop_ids=frozenset([tokens[-1]])))


def by_cancel(network: WatchedNetwork, tokens: list[int]) -> Iterator[Event]:
    cancel = CancelFlag()
    said = 0
    for event in Engine(network, context_limit=256).generate(Request(PROMPT, cancel=cancel)):
        said += isinstance(event, Step)
        if said == len(tokens):
            cancel.set()
        yield event


def by_context_limit(network: WatchedNetwork, tokens: list[int]) -> Iterator[Event]:
    return Engine(network, context_limit=len(PROMPT) - 1 + len(tokens)).generate(Request(PROMPT))


def by_close(network: WatchedNetwork, tokens: list[int]) -> Iterator[Event]:
    events = Engine(network, context_limit=256).generate(Request(PROMPT))
    said = 0
    while said < len(tokens):
        event = next(events)
        said += isinstance(event, Step)
        yield event
    events.close()  # type: ignore[attr-defined]


@pytest.mark.sampled
@pytest.mark.parametrize("end", [by_length, by_stop_id, by_cancel, by_context_limit, by_close])
@pytest.mark.parametrize("forgets", [False, True])
def test_rollback_of_the_queued_step_keeps_the_last_tokens_kv(
    network: Decoder, end: Callable[[WatchedNetwork, list[int]], Iterator[Event]], forgets: bool
) -> None:
    greedy = recomputed(network, PROMPT, STEPS)
    steps = next(i for i in range(4, STEPS) if greedy[i] not in greedy[:i]) + 1  # ends on a token not seen before
    expected, _ = step_by_step(network, PROMPT, steps)
    looked_ahead = end in (by_stop_id, by_cancel, by_close)

    watched = WatchedNetwork(network, forgets=forgets)
    events = list(end(watched, expected))
    tokens = [token for event in events if isinstance(event, Step) for token in event.tokens]
    cache = watched.caches[0]
    assert committed(cache) == len(PROMPT) - 1 + steps + looked_ahead
    assert same_rows(cache, step_by_step(network, PROMPT, steps + looked_ahead)[1])
    if end is by_stop_id:
        last = events[-1]
        assert isinstance(last, Finished)
        assert (tokens, last.stop_id, last.reason) == (expected[:-1], expected[-1], "stop")
    else:
        assert tokens == expected
    assert len(watched.fed) - 1 == steps + looked_ahead  # at a known end nothing is built ahead at all


class SpoiledToken(WatchedNetwork):
    """Every value computed of one token is NaN, as of a damaged row of weights."""

    def embed(self, tokens: mx.array) -> mx.array:
        x = super().embed(tokens)
        return mx.where((tokens == 9)[..., None], float("nan"), x)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=5, seed=1)])
@pytest.mark.parametrize("prompt", [[5, 9, 17, 3], [5, 17, 3, 9]], ids=["prefill", "decode"])
def test_nan_in_keys_or_queries_raises_engine_error(
    network: Decoder, prompt: list[int], params: SamplingParams
) -> None:
    with pytest.raises(EngineError, match="not finite"):
        answer(SpoiledToken(network), Request(prompt, sampling=params, max_tokens=3))
    tokens, _ = answer(network, Request(PROMPT, sampling=params, max_tokens=3))
    assert len(tokens) == 3
