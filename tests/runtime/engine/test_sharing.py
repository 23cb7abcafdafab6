"""Prefixes computed once and used by many: requests of a batch, turns and branches of a chat."""

from itertools import chain

import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, PrefillProgress, Request, Step
from headrace.runtime.kv.pool import PoolStats
from headrace.runtime.ops import BLOCK
from tests.support.watched import WatchedNetwork, answer, split

LIMIT = 4 * BLOCK
SYSTEM = [(7 * i * i + 3 * i + 5) % 96 for i in range(2 * BLOCK + 30)]


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    return either


def stats(engine: Engine) -> PoolStats:
    assert engine.kv.pool is not None
    return engine.kv.pool.stats


def serve(engine: Engine, requests: list[Request]) -> list[list[Event]]:
    sequences = [engine.submit(request) for request in requests]
    events: dict[int, list[Event]] = {id(sequence): [] for sequence in sequences}
    while engine.has_work:
        for sequence, event in engine.step():
            events[id(sequence)].append(event)
    return [events[id(sequence)] for sequence in sequences]


@pytest.mark.sampled
@pytest.mark.parametrize("short_first", [False, True])
def test_a_common_prefix_of_a_batch_is_prefilled_once(network: Decoder, short_first: bool) -> None:
    watched = WatchedNetwork(network)
    prompts = [[*SYSTEM, *[number] * (5 + number)] for number in range(4)]
    if short_first:
        prompts[0] = SYSTEM[: BLOCK + 7]
    events = serve(Engine(watched, context_limit=LIMIT), [Request(prompt, max_tokens=6) for prompt in prompts])
    ends = [split(ours)[1].summary for ours in events]
    whole = [0, BLOCK, 2 * BLOCK, 2 * BLOCK] if short_first else [0, *[2 * BLOCK] * 3]
    assert [end.reused_tokens for end in ends] == whole
    assert [end.prefill_tokens for end in ends] == [
        len(prompt) - 1 - reused for prompt, reused in zip(prompts, whole, strict=True)
    ]
    fed = list(chain.from_iterable(tokens[0].tolist() for tokens in watched.fed))
    assert len(fed) == sum(len(prompt) - reused + 5 for prompt, reused in zip(prompts, whole, strict=True))
    for prompt, ours, reused in zip(prompts, events, whole, strict=True):
        assert split(ours)[0] == answer(network, Request(prompt, max_tokens=6), LIMIT)[0]
        progress = [event for event in ours if isinstance(event, PrefillProgress)]
        assert {event.reused for event in progress} == {reused}


@pytest.mark.sampled
def test_all_blocks_are_free_after_a_batch(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT)
    for _ in range(2):
        first, second = serve(engine, [Request(SYSTEM, max_tokens=3), Request(SYSTEM, max_tokens=3)])
        assert split(first)[1].summary.reused_tokens == 0
        assert split(second)[1].summary.reused_tokens == 2 * BLOCK
        assert stats(engine) == PoolStats(0, 0, 0, 0)


@pytest.mark.sampled
def test_all_branches_of_a_chat_stay_cached(network: Decoder) -> None:
    chat = Engine(network, context_limit=LIMIT, keep_prefix=True)
    first = list(SYSTEM)
    said, _ = split(list(chat.generate(Request(first, max_tokens=9))))
    branches = [[*first, *said, 1, 2, 3], [*first, *said[:4], 80, 81]]
    for branch in branches:
        more, end = split(list(chat.generate(Request(branch, max_tokens=5))))
        assert end.summary.reused_tokens >= len(first)
        branch += [*more, 7]
    for branch in branches:
        events = list(chat.generate(Request(branch, max_tokens=5)))
        tokens, end = split(events)
        assert end.summary.reused_tokens == len(branch) - 2  # the last token said was never fed
        assert tokens == answer(network, Request(branch, max_tokens=5), LIMIT)[0]
        assert all(event.record.kv_used_bytes for event in events if isinstance(event, Step))


@pytest.mark.sampled
def test_cached_blocks_take_at_most_one_full_sequence(network: Decoder) -> None:
    chat = Engine(network, context_limit=LIMIT, keep_prefix=True)
    for number in range(8):
        list(chat.generate(Request([number, *SYSTEM], max_tokens=3)))
        assert stats(chat).total <= LIMIT // BLOCK + 1 + 8  # and a slab
        assert stats(chat).used == 0
    _, end = split(list(chat.generate(Request([7, *SYSTEM, 4], max_tokens=1))))
    assert end.summary.reused_tokens == len(SYSTEM) + 1
