"""Prefixes copied out of one sequence's buffers into another's: the same bits, in no more memory than is spare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine import kv_budget
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv import slot_cache
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.buffers import BufferBackend
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.ops import BLOCK, reference
from tests.support.alone import Alone
from tests.support.pooled import feed, say
from tests.support.steady import SteadyPace
from tests.support.tiny import load_decoder, write_model
from tests.support.watched import answer, split

CHAT = [(7 * i * i + 3 * i) % 96 for i in range(6 * BLOCK + 50)]
ANSWER = CHAT[6 * BLOCK - 10 :]  # the end of it
LIMIT = 8 * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-window"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_model(tmp_path_factory.mktemp("model"), request.param), reference)


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the entries of a chunk of buffers: fewer, so that short sequences fill several."""
    chunk = CHUNK // 4
    monkeypatch.setattr(slot_cache, "CHUNK", chunk)
    monkeypatch.setattr(slot_cache, "GROWTH", 4 * chunk)
    monkeypatch.setattr(kv_budget, "CHUNK", chunk)
    return chunk


def new_kv(network: Decoder, spare: Callable[[int], int] | None = None) -> BufferBackend:
    kv = network.kv_backend(KVOptions(LIMIT, spare=spare))
    assert isinstance(kv, BufferBackend)
    return kv


def new_slot(kv: BufferBackend) -> Any:
    return Alone(kv.new_cache())


def pool_of(kv: BufferBackend) -> BlockPool:
    assert kv.pool is not None
    return kv.pool


def said(network: Decoder, kv: BufferBackend) -> Any:
    """A sequence that was asked and answered, and left what it has."""
    slot = new_slot(kv)
    feed(network, slot, CHAT[: -len(ANSWER)])
    slot.cache_blocks(CHAT)
    say(network, slot, ANSWER)
    slot.cache_blocks(CHAT, end=True)
    assert pool_of(kv).stats.used == 0
    return slot


def goes_on_alike(network: Decoder, ours: Any, theirs: Any) -> bool:
    return bool(mx.array_equal(say(network, ours, [7, 8, 9]), say(network, theirs, [7, 8, 9])))


@pytest.mark.sampled
def test_a_sequence_continues_from_copied_buffers(network: Decoder) -> None:
    kv = new_kv(network)
    own = said(network, kv)
    copy = new_slot(kv)
    assert copy.load_prefix(CHAT, answers=True) == len(CHAT)
    assert goes_on_alike(network, copy, own)
    copy.trim(len(CHAT))
    total = pool_of(kv).stats.total
    copy.cache_blocks(CHAT, end=True)
    assert pool_of(kv).stats.total == total  # all of it was there
    assert pool_of(kv).stats.used == 0


@pytest.mark.sampled
def test_a_prompt_begins_with_prefilled_tokens_without_answers(network: Decoder) -> None:
    kv = new_kv(network)
    said(network, kv)
    slot = new_slot(kv)
    reused = slot.load_prefix(CHAT)
    assert reused in (0, len(CHAT) - len(ANSWER))  # 0: a window that ends there lacks blocks
    if reused:
        cold = new_slot(kv)
        feed(network, cold, CHAT[:reused])
        assert goes_on_alike(network, slot, cold)


@pytest.mark.sampled
def test_kv_from_disk_have_the_same_bits(network: Decoder, tmp_path: Path) -> None:
    first = new_kv(network)
    second = new_kv(network)
    own = said(network, first)
    store = DiskStore(tmp_path, 1 << 30)
    assert store_blocks(pool_of(first), CHAT, store) == 7
    assert load_blocks(pool_of(second), CHAT, store) == 7
    slot = new_slot(second)
    assert slot.load_prefix(CHAT, answers=True) == len(CHAT)
    assert goes_on_alike(network, slot, own)


def test_a_prefix_without_memory_is_not_cached(buffered: Decoder) -> None:
    spare = [0]
    kv = new_kv(buffered, lambda _taken: spare[0])
    spare[0] = three = 3 * pool_of(kv).storage.block_bytes(0)
    said(buffered, kv)
    assert pool_of(kv).storage.nbytes == three
    slot = new_slot(kv)
    assert slot.load_prefix(CHAT) == 3 * BLOCK  # the beginning, not the end
    other = new_slot(kv)
    feed(buffered, other, [5, *CHAT[:BLOCK]])
    other.cache_blocks([5, *CHAT[:BLOCK]])  # the least recently used gives place
    assert new_slot(kv).load_prefix([5, *CHAT]) == BLOCK
    assert new_slot(kv).load_prefix(CHAT) == 2 * BLOCK
    spare[0] = 0
    kv.evict()
    assert (pool_of(kv).storage.nbytes, pool_of(kv).stats.total) == (0, 0)
    assert new_slot(kv).load_prefix(CHAT) == 0


def test_sequences_evict_cached_prefixes(buffered: Decoder) -> None:
    """Promised to sequences and taken by blocks, together never more than K/V may take; and all of it is used."""
    memory = buffered.cost.kv_bytes(5 * CHUNK)
    engine = Engine(buffered, context_limit=2 * CHUNK, keep_prefix=True, kv_memory=memory)
    prompts = [[number, *CHAT[: CHUNK - 9 + 20 * number]] for number in range(4)]
    requests = [Request(prompt, max_tokens=12) for prompt in prompts]
    expected = [answer(buffered, request, 2 * CHUNK)[0] for request in requests]
    most = 0
    for together in (1, 4, 2):
        tokens: dict[Any, list[int]] = {engine.submit(request): [] for request in requests[:together]}
        while engine.has_work:
            for sequence, event in engine.step():
                tokens[sequence] += event.tokens if isinstance(event, Step) else ()
            load = engine.load()
            assert load.kv_used_bytes + load.pool_bytes <= memory
            most = max(most, load.kv_used_bytes + load.pool_bytes)
        assert list(tokens.values()) == expected[:together]
    assert most > memory * 0.9


def test_a_chat_too_long_for_a_copy_continues_in_its_buffers(buffered: Decoder) -> None:
    memory = buffered.cost.kv_bytes(4 * CHUNK)
    engine = Engine(buffered, context_limit=4 * CHUNK, keep_prefix=True, kv_memory=memory)
    list(engine.generate(Request(CHAT, max_tokens=2)))
    _, end = split(list(engine.generate(Request([*CHAT, 4, 5], max_tokens=2))))
    assert end.summary.reused_tokens == len(CHAT)


def test_packed_kv_have_no_block_pool(buffered: Decoder) -> None:
    from headrace.runtime.ops.kv_format import Q8

    assert new_kv(buffered.with_kv(Q8)).pool is None
    assert new_kv(buffered).pool is not None


def test_a_cache_grows_without_wired_memory(buffered: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = list[bool]()
    inside = list[bool]()
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: inside.append(limit == 0) or 1)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    slot = new_slot(new_kv(buffered))
    feed(buffered, slot, CHAT[:10])
    del cleared[:], inside[:]
    feed(buffered, slot, CHAT)
    assert inside.count(True) == inside.count(False) >= 1
    assert not cleared


def count_moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the entries of each copy of a layer's buffers to larger ones."""
    moves = list[int]()
    move = SlotCache._move

    def counted(cache: SlotCache, layer: int, kept: slice, capacity: int) -> None:
        if kept.stop > kept.start:
            moves.append(kept.stop - kept.start)
        move(cache, layer, kept, capacity)

    monkeypatch.setattr(SlotCache, "_move", counted)
    return moves


@pytest.mark.sampled
@pytest.mark.parametrize("max_tokens", [30, None])
def test_a_prompt_and_its_answer_are_never_copied(
    max_tokens: int | None, buffered: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = count_moves(monkeypatch)
    prompt = CHAT[: 3 * chunk + 50]
    request = Request(prompt, max_tokens, speculate="off")
    engine = Engine(buffered, context_limit=len(prompt) + chunk, chunk_budget=SteadyPace(chunk // 4))
    tokens, _ = split(list(engine.generate(request)))
    assert (len(tokens), moves) == (max_tokens or chunk + 1, [])


def test_a_chat_continues_without_a_copy(buffered: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(buffered, context_limit=4 * len(CHAT), keep_prefix=True, chunk_budget=SteadyPace(64))
    list(engine.generate(Request(CHAT, max_tokens=1, speculate="off")))
    moves = count_moves(monkeypatch)
    _, end = split(list(engine.generate(Request([*CHAT, 5, 4], max_tokens=30, speculate="off"))))
    assert (end.summary.reused_tokens, moves) == (len(CHAT), [])


def test_a_slot_grows_with_its_output_where_memory_is_short(
    buffered: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence has room for its output, the second one is admitted with its prompt's and grows once."""
    memory = buffered.cost.kv_bytes(5 * chunk)
    engine = Engine(buffered, context_limit=4 * chunk, kv_memory=memory, chunk_budget=SteadyPace(chunk // 4))
    prompts = [CHAT[first : first + chunk - 9] for first in (0, 1)]
    requests = [
        Request(prompt, tokens, speculate="off") for prompt, tokens in zip(prompts, (2 * chunk, 30), strict=True)
    ]
    moves = count_moves(monkeypatch)
    tokens: dict[Any, list[int]] = {engine.submit(request): [] for request in requests}
    most = 0
    while engine.has_work:
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
        most = max(most, engine.load().kv_used_bytes)
    assert most == memory
    assert moves == [chunk] * buffered.kv_shape.layers
    for request, ours in zip(requests, tokens.values(), strict=True):
        assert ours == answer(buffered, request, 4 * chunk)[0]
