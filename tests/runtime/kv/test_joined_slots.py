"""Sequences that decode in slots of shared buffers: as one by one, whoever comes, goes, grows or takes back beside."""

import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv.bank import Bank
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.kv.joined_cache import JoinedCache
from headrace.runtime.kv.joined_slots import JoinedSlots
from headrace.runtime.kv.slot_cache import SlotCache, SlotPool
from headrace.runtime.ops import BLOCK, Phase, reference
from tests.pooled import feed
from tests.steady import SteadyPace
from tests.tiny import load_decoder, write_model
from tests.watched import answer

LIMIT = 4 * CHUNK
# Plain, with head norms, YaRN, windows beside whole contexts, sinks and experts beside windows.
VARIANTS = ["llama", "qwen3-yarn", "gemma3", "mistral-window", "gpt-oss"]
Work = tuple[int, Phase]  # rows of a sequence in a pass


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {variant: write_model(root / variant, variant) for variant in [*VARIANTS, "gemma2"]}


@pytest.fixture(scope="module")
def llama(directories: dict[str, Path]) -> Decoder:
    return load_decoder(directories["llama"])


def new_pool(network: Decoder) -> SlotPool:
    pool = network.make_pool(64 * LIMIT, LIMIT)
    assert isinstance(pool, SlotPool)
    return pool


def fed(network: Decoder, pool: SlotPool, length: int, chunk: int = 64) -> SlotCache:
    slot = pool.make_slot(LIMIT)
    feed(network, slot, prompt_of(length), chunk)
    return slot


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + length) % 96 for i in range(length)]


def run(network: Decoder, cache: Any, tokens: Sequence[int]) -> mx.array:
    """Logits (N, V) of a pass."""
    cache.reserve(len(tokens), "decode")
    logits = network.all_logits(network.layers(network.embed(mx.array([list(tokens)])), cache))[0]
    cache.advance(len(tokens))
    mx.eval(logits)
    return logits


def decode(network: Decoder, caches: Sequence[SlotCache], tokens: Sequence[int] | None = None) -> mx.array:
    """A step of all of them together, committed."""
    logits = run(network, network.join(caches, [(1, "decode")] * len(caches)), tokens or [5] * len(caches))
    for cache in caches:
        cache.commit(1)
    return logits


def entries(cache: SlotCache, firsts: Sequence[int]) -> list[mx.array]:
    """K/V of each layer (Hkv, entries, D) from these positions on."""
    return [
        held[cache.slot, :, begin - first : cache.length - first]
        for side in cache.sides
        for held, begin, first in zip(side, firsts, cache.firsts, strict=True)
    ]


def difference(ours: mx.array, theirs: mx.array) -> float:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return float((mx.abs(ours - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-9)).item())


def bank_of(cache: SlotCache) -> Bank:
    assert cache.bank is not None
    return cache.bank


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_sequence_by_sequence(directories: dict[str, Path], variant: str, dtype: mx.Dtype) -> None:
    """In any order of comings, ends, growth, guesses taken back and prompts beside; and in no other dtype."""
    if variant == "gpt-oss" and dtype != mx.float32:
        pytest.skip("on a CPU MLX multiplies gathered matrices in float32 alone")
    network = load_decoder(directories[variant], reference, dtype)
    bound = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}[dtype]
    chance = random.Random(3)
    pools = new_pool(network), new_pool(network)
    pairs: list[tuple[SlotCache, ...]] = []
    together = 0
    for _ in range(60):
        while len(pairs) < 3 or (len(pairs) < 6 and chance.random() < 0.2):
            length = chance.choice([1, 9, 40, 60, CHUNK - 4, CHUNK - 2, 2 * CHUNK - 3, 3 * CHUNK - 9])
            pairs.append(tuple(fed(network, pool, length) for pool in pools))
        if len(pairs) > 2 and chance.random() < 0.15:
            for cache in pairs.pop(chance.randrange(len(pairs))):
                cache.close()
        taking = chance.sample(pairs, chance.randint(2, len(pairs)))
        rows: list[Work] = [chance.choice([(1, "decode")] * 9 + [(3, "decode"), (20, "prefill")]) for _ in taking]
        tokens = [chance.randrange(96) for _ in range(sum(count for count, _ in rows))]
        ours, theirs = zip(*taking, strict=True)
        got, expected = run(network, network.join(ours, rows), tokens), run(network, JoinedCache(theirs, rows), tokens)
        assert got.dtype == dtype
        assert difference(got, expected) < bound
        together += sum(cache.bank is not None for cache in ours) > 1
        for pair, (count, phase) in zip(taking, rows, strict=True):
            said = count if phase == "prefill" else chance.randint(1, count)
            for cache in pair:
                cache.commit(said)
                cache.rollback()
            firsts = [max(begins) for begins in zip(*(cache.firsts for cache in pair), strict=True)]
            for kept, other in zip(*(entries(cache, firsts) for cache in pair), strict=True):
                assert kept.dtype == dtype
                assert difference(kept, other) < bound
        pools[0].give_way()
        pairs = [pair for pair in pairs if pair[0].length < LIMIT - 32]
    assert together > 30
    assert all(cache.bank is None for _, cache in pairs)


@pytest.mark.parametrize("variant", ["llama", "gemma3", "gpt-oss"])
def test_one_attention_for_all_and_no_mask_where_lengths_are_one(
    directories: dict[str, Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_decoder(directories[variant])
    layers = len(network.config.layers)
    attention = mx.fast.scaled_dot_product_attention
    calls: list[tuple[int, Any]] = []

    def counting(q: mx.array, *arguments: Any, mask: Any, **named: Any) -> mx.array:
        calls.append((q.shape[0], mask))
        return attention(q, *arguments, mask=mask, **named)

    pool = new_pool(network)
    alike, other = [fed(network, pool, 30) for _ in range(3)], fed(network, pool, 33)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)
    decode(network, alike)
    assert calls == [(3, None)] * layers
    calls.clear()
    run(network, alike[1], [5])  # alone, from its slot
    assert calls == [(1, None)] * layers
    alike[1].commit(1)
    calls.clear()
    decode(network, [*alike, other])
    assert [sequences for sequences, _ in calls] == [4] * layers
    assert all(isinstance(mask, mx.array) and mask.dtype == mx.bool_ for _, mask in calls)


def test_softcaps_go_sequence_by_sequence(directories: dict[str, Path]) -> None:
    network = load_decoder(directories["gemma2"])
    pool = new_pool(network)
    caches = [fed(network, pool, length) for length in (5, 9)]
    assert type(network.join(caches, [(1, "decode")] * 2)) is JoinedCache
    decode(network, caches)
    assert [cache.bank for cache in caches] == [None, None]


def test_what_one_attention_does_not_express_is_not_seated(llama: Decoder) -> None:
    pool = new_pool(llama)
    prompt, guessing, far, alone = (fed(llama, pool, length) for length in (5, 9, CHUNK + 3, 7))
    rows: list[Work] = [(1, "decode"), (1, "decode"), (4, "decode"), (16, "prefill")]
    joined = llama.join([alone, far, guessing, prompt], rows)
    assert isinstance(joined, JoinedSlots)
    run(llama, joined, [5] * 22)
    assert {cache.bank for cache in (prompt, guessing, far, alone)} == {None}


def test_a_step_copies_no_entries(llama: Decoder) -> None:
    """Beside what is there, a step takes less than the K/V of one layer of one sequence."""
    pool = new_pool(llama)
    caches = [fed(llama, pool, 3 * CHUNK - 9 - number) for number in range(6)]
    decode(llama, caches)
    bank = bank_of(caches[0])
    layer = bank.slot_bytes // (2 * len(llama.config.layers))
    for _ in range(3):
        mx.synchronize()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        decode(llama, caches)
        assert mx.get_peak_memory() - active < 2 * layer


def test_seating_takes_one_more_layer_and_no_other_cache(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, 3 * CHUNK + 9) for _ in range(6)]
    joined = llama.join(caches, [(1, "decode")] * 6)
    mx.synchronize()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    joined.reserve(6)
    buffer = 6 * bank_of(caches[0]).slot_bytes // (2 * len(llama.config.layers))
    assert mx.get_peak_memory() - active < 1.1 * buffer
    assert mx.get_active_memory() - active < 0.1 * buffer


def test_sequences_of_about_one_length_share_a_bank(llama: Decoder) -> None:
    """However their prompts were cut: buffers have as many rows as others' have."""
    pool, alone = new_pool(llama), new_pool(llama)
    lengths = [(2 * CHUNK + 5, 1024), (3 * CHUNK - 1, 64)]  # and so of three chunks, and of four
    ours, theirs = ([fed(llama, each, *length) for length in lengths] for each in (pool, alone))
    assert ours[0].allocated_bytes < ours[1].allocated_bytes
    for _ in range(3):
        logits = decode(llama, ours)
        assert difference(logits, mx.concatenate([run(llama, cache, [5]) for cache in theirs])) < 1e-5
    assert ours[0].bank is ours[1].bank is not None
    assert ours[0].allocated_bytes == ours[1].allocated_bytes == bank_of(ours[0]).slot_bytes


def test_others_begin_with_what_is_in_a_slot(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, CHUNK - 50 + number) for number in range(3)]
    decode(llama, caches)
    caches[2].publish(prompt_of(CHUNK - 48))
    other = pool.make_slot(LIMIT)
    assert other.resume(prompt_of(CHUNK - 48)) == BLOCK
    for ours, theirs in zip(entries(other, other.firsts), entries(caches[2], other.firsts), strict=True):
        assert mx.array_equal(ours, theirs[:, :BLOCK])


def test_what_few_of_a_bank_need_is_not_read_for_all(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, 9) for _ in range(5)]
    decode(llama, caches)
    assert [len(members) for _, members in pool.seat(caches[1:4])] == [3]
    assert pool.seat(caches[3:]) == []


def test_a_bank_takes_those_who_come_and_gives_back_what_is_idle(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, 9 + number) for number in range(9)]
    slots = []
    for count in (2, 3, 4, 5, 9):
        decode(llama, caches[:count])
        slots.append(bank_of(caches[0]).slots)
    assert slots == [2, 4, 4, 8, 16]  # copied three times, not with everyone who comes
    bank = bank_of(caches[0])
    assert {cache.bank for cache in caches} == {bank}
    assert [cache.slot for cache in caches] == list(range(9))
    caches.pop(3).close()
    del caches[0]  # forgotten
    decode(llama, caches)
    assert sorted(cache.slot for cache in caches) == list(range(7))
    assert (bank.slots, pool.slabs.banks.idle_bytes) == (7, 0)  # more than half of 16 were
    decode(llama, caches)
    assert bank.sides[0][0].shape[0] == 7
    for cache in caches[:4]:
        cache.close()
    assert pool.slabs.banks.idle_bytes == 4 * bank.slot_bytes
    pool.give_way()
    assert (bank.slots, pool.slabs.banks.idle_bytes) == (3, 0)


def test_idle_slots_are_of_memory_that_is_spare(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, 9) for _ in range(4)]
    taken: list[int] = []
    pool.slabs.spare = lambda nbytes: taken.append(nbytes) or 0  # type: ignore[func-returns-value]
    decode(llama, caches[:2])
    decode(llama, caches[:3])
    bank = bank_of(caches[0])
    assert bank.slots == 3
    pool.slabs.spare = lambda nbytes: 6 * bank.slot_bytes - nbytes
    decode(llama, caches)
    assert bank.slots == 6
    assert pool.slabs.excess == 0
    pool.slabs.spare = lambda nbytes: 5 * bank.slot_bytes - nbytes
    pool.give_way()
    assert bank.slots == 4
    assert pool.slabs.excess == -bank.slot_bytes


def test_memory_goes_with_the_last_sequence(llama: Decoder) -> None:
    gc.collect()
    pool = new_pool(llama)
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = [fed(llama, pool, 30) for _ in range(5)]
    decode(llama, caches)
    assert mx.get_active_memory() - before >= 5 * bank_of(caches[0]).slot_bytes
    caches[2].leave()
    for cache in caches:
        cache.close()
    del cache, caches
    assert list(pool.slabs.banks) == []
    assert mx.get_active_memory() <= before


def test_a_sequence_grows_out_of_its_bank_and_into_the_next(llama: Decoder) -> None:
    pool = new_pool(llama)
    caches = [fed(llama, pool, CHUNK - 2) for _ in range(3)]
    decode(llama, caches)
    small = bank_of(caches[0])
    for cache in caches[:2]:
        run(llama, cache, [3, 4, 5])
        cache.commit(3)
        assert (cache.bank, cache.slot, cache.allocated_bytes) == (None, 0, 2 * small.slot_bytes)
    decode(llama, caches)
    assert bank_of(caches[0]) is bank_of(caches[1]) is not small
    assert caches[2].bank is small
    assert (small.slots, small.taken) == (1, 1)


def test_the_last_of_a_chat_takes_no_bank_along(llama: Decoder) -> None:
    """Of a conversation's last sequence, kept for the next prompt."""
    engine = Engine(llama, context_limit=LIMIT, keep_prefix=True)
    requests = [Request([number, 4, 7], max_tokens=4 + 20 * number) for number in range(3)]
    tokens: dict[Any, list[int]] = {engine.submit(request): [] for request in requests}
    banks = 0
    while engine.has_work:
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
        assert isinstance(engine.caches.pool, SlotPool)
        banks = max(banks, len(list(engine.caches.pool.slabs.banks)))
    assert banks == 1
    assert list(engine.caches.pool.slabs.banks) == []
    for request, said in zip(requests, tokens.values(), strict=True):
        assert said == answer(llama, request, LIMIT)[0]


def test_everyone_says_what_it_says_alone(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted at any time, some cancelled, some with guesses, in memory so short that some step back."""
    chance = random.Random(8)
    memory = llama.cost.kv_bytes(5 * CHUNK)
    engine = Engine(llama, context_limit=2 * CHUNK, kv_memory=memory, pace=SteadyPace(CHUNK))
    assert isinstance(engine.caches.pool, SlotPool)
    pool, seat, together = engine.caches.pool, engine.caches.pool.seat, list[int]()

    def watched(slots: Sequence[SlotCache]) -> Any:
        groups = seat(slots)
        together.extend(len(members) for _, members in groups)
        assert not pool.slabs.banks.idle_bytes or pool.slabs.excess <= 0
        return groups

    monkeypatch.setattr(pool, "seat", watched)
    to_come = [
        Request(prompt_of(chance.randint(CHUNK - 40, CHUNK - 10)), 90, speculate=chance.choice(["off", "ngram"]))
        for _ in range(5)
    ]
    grow_together = [Request(prompt_of(CHUNK - 20), 90, speculate="off") for _ in range(3)]
    tokens: dict[Any, list[int]] = {engine.submit(request): [] for request in grow_together}
    cancelled = set()
    stepped_back = 0
    while to_come or engine.has_work:
        if to_come and chance.random() < 0.4:
            tokens[engine.submit(to_come.pop())] = []
        if tokens and chance.random() < 0.01:
            cancelled.add(sequence := chance.choice(list(tokens)))
            engine.cancel(sequence)
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
        stepped_back += engine.load().preempted
    assert len(together) > 50
    assert max(together) > 2
    assert stepped_back
    for sequence, said in tokens.items():
        expected = answer(llama, sequence.request, 2 * CHUNK)[0]
        assert said == (expected[: len(said)] if sequence in cancelled else expected)
