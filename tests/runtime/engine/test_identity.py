"""On the native kernels nothing but a sequence's own tokens decides what it says: not who joins, ends, is cancelled or
steps back beside it, not what it shares a beginning with. Tokens, log probabilities of all of the vocabulary and K/V
are compared bit for bit with those of the sequence alone and cold."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Finished, Request, Step
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.ops import BLOCK, native
from headrace.runtime.sampling.params import SamplingParams
from tests.support.tiny import load_decoder, quantize_model, write_model
from tests.support.watched import WatchedNetwork, committed_rows, same_rows

pytestmark = pytest.mark.skipif(not native.status().available, reason="stock MLX promises tokens, not bits")
LIMIT = 640
SAYS = 300
SYSTEM = [(7 * i * i + 3 * i + 1) % 96 for i in range(BLOCK + 40)]
SAMPLED = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("identity")
    return load_decoder(quantize_model(write_model(root / "plain", "llama"), root / "model"), native)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy and sampled; some share one whole block and a part."""
    draw = random.Random(5)
    found = []
    for number in range(8):
        own = [draw.randrange(96) for _ in range(draw.randint(1, 90))]
        prompt = [*SYSTEM, *own] if number % 2 else own
        sampling = replace(SAMPLED, seed=number) if number % 4 > 1 else SamplingParams()
        found.append(Request(prompt, max_tokens=SAYS, sampling=sampling, logprobs=96))
    return found


@pytest.fixture(scope="module")
def cold(network: Decoder, requests: list[Request]) -> list[tuple[list[Any], Any]]:
    """Each request alone: its output tokens, and its cache."""
    found = []
    for request in requests:
        watched = WatchedNetwork(network)
        events = list(Engine(watched, context_limit=LIMIT).generate(replace(request, speculate="off")))
        assert len(said(events)) == SAYS
        found.append((said(events), watched.caches[0]))
    return found


def said(events: list[Event]) -> list[Any]:
    said = [event for event in events if isinstance(event, Step)]
    return [pair for step in said for pair in zip(step.tokens, step.logprobs or [None] * len(step.tokens), strict=True)]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_answer_is_the_same_alone_and_in_a_busy_batch(
    network: Decoder, requests: list[Request], cold: list[tuple[list[Any], Any]], seed: int
) -> None:
    """In random order; with seed 2 memory is so short that some step back, all being long at the same time."""
    chance = random.Random(seed)
    room = 3 * LIMIT if seed == 2 else 16 * LIMIT
    watched = WatchedNetwork(network)
    engine = Engine(watched, context_limit=LIMIT, kv_memory=room * network.cost.kv_bytes_per_token)
    to_come = list(enumerate(requests))
    chance.shuffle(to_come)
    ours: dict[Sequence, int] = {}
    events: dict[Sequence, list[Event]] = {}
    passing: list[Sequence] = []
    stepped_back = 0

    def submit(request: Request) -> Sequence:
        sequence = engine.submit(request)
        events[sequence] = []
        return sequence

    while to_come or engine.has_work:
        if to_come and chance.random() < 0.2:
            number, request = to_come.pop()
            ours[submit(replace(request, speculate="off") if seed == 2 else request)] = number
        if chance.random() < 0.03 and to_come:
            own = [chance.randrange(96) for _ in range(chance.randint(1, 50))]
            passing.append(submit(Request([*SYSTEM[: chance.randint(0, len(SYSTEM))], *own], chance.randint(1, 80))))
        if passing and chance.random() < 0.02:
            engine.cancel(chance.choice(passing))
        for sequence, event in engine.step():
            events[sequence].append(event)
        stepped_back += any(sequence.state == "preempted" for sequence in ours)
    assert bool(stepped_back) == (seed == 2)
    reused = 0
    for sequence, number in ours.items():
        tokens, cache = cold[number]
        assert said(events[sequence]) == tokens
        end = events[sequence][-1]
        assert isinstance(end, Finished)
        reused += end.summary.reused_tokens
        held = [other for other in watched.caches if vars(other).get("last_committed") == vars(cache)["last_committed"]]
        assert any(same_rows(other, cache) for other in held)
    assert reused >= 2 * BLOCK
    assert engine.kv.pool is not None
    assert engine.kv.pool.stats.total == 0


def test_a_shared_prefix_has_the_bits_of_a_cold_start(network: Decoder) -> None:
    """K/V of the blocks that the second takes from the first, which had gone on from them with answers of its own."""
    prompt = [*SYSTEM, 5, 6]
    watched = WatchedNetwork(network)
    alone = WatchedNetwork(network)
    engine = Engine(watched, context_limit=LIMIT)
    first = engine.submit(Request(prompt, max_tokens=9))
    second = engine.submit(Request(prompt, max_tokens=9))
    while engine.has_work:
        engine.step()
    assert (first.reused, second.reused) == (0, BLOCK)
    list(Engine(alone, context_limit=LIMIT).generate(Request(prompt, max_tokens=9)))
    assert len(committed_rows(alone.caches[0])) == 2 * len(network.config.layers)
    assert all(same_rows(cache, alone.caches[0]) for cache in watched.caches)


def test_a_hundred_requests_leak_no_blocks(network: Decoder) -> None:
    leave_nothing_behind(network, 100)


def leave_nothing_behind(network: Decoder, count: int) -> None:
    """Requests of random lengths, some cancelled, some stepping back; then blocks and memory are as at the start."""
    import gc

    import mlx.core as mx

    chance = random.Random(3)
    gc.collect()
    before = mx.get_active_memory()
    engine = Engine(network, context_limit=LIMIT, kv_memory=4 * LIMIT * network.cost.kv_bytes_per_token)
    open_ = list[Sequence]()
    submitted = 0
    ends = 0
    while submitted < count or engine.has_work:
        while submitted < count and len(open_) < 20:
            shared = SYSTEM[: chance.choice([0, 0, len(SYSTEM)])]
            prompt = [*shared, *(chance.randrange(96) for _ in range(chance.randint(1, 120)))]
            sampling = replace(SAMPLED, seed=submitted) if submitted % 5 == 0 else SamplingParams()
            open_.append(engine.submit(Request(prompt, chance.randint(1, 25), sampling)))
            submitted += 1
        if open_ and chance.random() < 0.05:
            engine.cancel(chance.choice(open_))
        for sequence, event in engine.step():
            if isinstance(event, Finished):
                ends += 1
                open_.remove(sequence)
    assert ends == count
    assert engine.kv.pool is not None
    assert engine.kv.pool.stats.total == 0
    assert engine.load().kv_used_bytes == 0
    gc.collect()
    assert mx.get_active_memory() <= before
