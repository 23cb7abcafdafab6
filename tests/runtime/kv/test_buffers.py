"""Sequences that decode in slots of shared buffers: as one by one, whoever comes, goes, grows or takes back beside."""

import gc
import random
from collections.abc import Callable, Sequence
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
from headrace.runtime.kv.buffers import BufferBackend, BufferPass, SlotBuffers, idle_bytes
from headrace.runtime.kv.cache import CHUNK, PassRow
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.ops import BLOCK, Phase, reference
from tests.support.alone import Alone
from tests.support.pooled import feed
from tests.support.steady import SteadyPace
from tests.support.tiny import load_decoder, write_model
from tests.support.watched import answer

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


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the entries of a chunk of buffers: fewer, so that short prompts fill several."""
    chunk = CHUNK // 4
    monkeypatch.setattr(slot_cache, "CHUNK", chunk)
    monkeypatch.setattr(slot_cache, "GROWTH", 4 * chunk)
    monkeypatch.setattr(kv_budget, "CHUNK", chunk)
    return chunk


def new_kv(network: Decoder, spare: Callable[[int], int] | None = None) -> BufferBackend:
    kv = network.kv_backend(KVOptions(LIMIT, max_running=64, spare=spare))
    assert isinstance(kv, BufferBackend)
    return kv


def excess(kv: BufferBackend) -> int:
    assert kv.pool is not None
    return kv.pool.storage.excess


def fed(network: Decoder, kv: BufferBackend, length: int, chunk: int = 64) -> SlotCache:
    slot = kv.new_cache()
    feed(network, Alone(slot), prompt_of(length), chunk)
    return slot


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + length) % 96 for i in range(length)]


def run(network: Decoder, one_pass: Any, tokens: Sequence[int]) -> mx.array:
    """Logits (N, V) of a pass."""
    logits = network.all_logits(network.layers(network.embed(mx.array([list(tokens)])), one_pass))[0]
    one_pass.advance()
    mx.eval(logits)
    return logits


def run_alone(network: Decoder, cache: SlotCache, tokens: Sequence[int]) -> mx.array:
    return run(network, BufferPass([PassRow(cache, len(tokens), "decode")]), tokens)


def join(kv: BufferBackend, caches: Sequence[SlotCache], rows: Sequence[Work]) -> BufferPass:
    [one_pass] = kv.make_passes([PassRow(cache, *work) for cache, work in zip(caches, rows, strict=True)])
    assert isinstance(one_pass, BufferPass)
    return one_pass


def join_apart(caches: Sequence[SlotCache], rows: Sequence[Work]) -> BufferPass:
    """Attention goes sequence by sequence."""
    return BufferPass([PassRow(cache, *work) for cache, work in zip(caches, rows, strict=True)])


def decode(network: Decoder, kv: BufferBackend, caches: Sequence[SlotCache]) -> mx.array:
    """A step of all of them together, committed."""
    logits = run(network, join(kv, caches, [(1, "decode")] * len(caches)), [5] * len(caches))
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
    ours = ours.astype(mx.float32)
    theirs = theirs.astype(mx.float32)
    return float((mx.abs(ours - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-9)).item())


def bank_of(cache: SlotCache) -> SlotBuffers:
    assert isinstance(cache.buffers, SlotBuffers)
    return cache.buffers


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [  # float32 for all, the half precisions in turn; on a CPU MLX multiplies gathered matrices in float32 alone
        *((variant, mx.float32) for variant in VARIANTS),
        ("llama", mx.bfloat16), ("qwen3-yarn", mx.float16), ("gemma3", mx.bfloat16), ("mistral-window", mx.float16),
    ],
    ids=str,
)  # fmt: skip
def test_joined_slots_give_the_output_of_separate_sequences(
    directories: dict[str, Path], variant: str, dtype: mx.Dtype, chunk: int
) -> None:
    """In any order of comings, ends, growth, guesses taken back and prompts beside; and in no other dtype."""
    network = load_decoder(directories[variant], reference, dtype)
    bound = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}[dtype]
    chance = random.Random(3)
    kvs = new_kv(network), new_kv(network)
    pairs: list[tuple[SlotCache, ...]] = []
    together = 0
    rounds = 60 if dtype == mx.float32 else 30
    for _ in range(rounds):
        while len(pairs) < 3 or (len(pairs) < 6 and chance.random() < 0.2):
            length = chance.choice([1, 9, 40, 60, chunk - 4, chunk - 2, 2 * chunk - 3, 3 * chunk - 9])
            pairs.append(tuple(fed(network, kv, length) for kv in kvs))
        if len(pairs) > 2 and chance.random() < 0.15:
            for cache in pairs.pop(chance.randrange(len(pairs))):
                cache.close()
        taking = chance.sample(pairs, chance.randint(2, len(pairs)))
        rows: list[Work] = [chance.choice([(1, "decode")] * 9 + [(3, "decode"), (20, "prefill")]) for _ in taking]
        tokens = [chance.randrange(96) for _ in range(sum(count for count, _ in rows))]
        ours, theirs = zip(*taking, strict=True)
        got = run(network, join(kvs[0], ours, rows), tokens)
        expected = run(network, join_apart(theirs, rows), tokens)
        assert got.dtype == dtype
        assert difference(got, expected) < bound
        together += sum(cache.buffers is not None for cache in ours) > 1
        for pair, (count, phase) in zip(taking, rows, strict=True):
            said = count if phase == "prefill" else chance.randint(1, count)
            for cache in pair:
                cache.commit(said)
                cache.rollback()
            firsts = [max(begins) for begins in zip(*(cache.firsts for cache in pair), strict=True)]
            for kept, other in zip(*(entries(cache, firsts) for cache in pair), strict=True):
                assert kept.dtype == dtype
                assert difference(kept, other) < bound
        kvs[0].evict()
        pairs = [pair for pair in pairs if pair[0].length < 4 * chunk - 32]
    assert together > rounds // 3
    assert all(cache.buffers is None for _, cache in pairs)


@pytest.mark.parametrize("variant", ["llama", "gemma3", "gpt-oss"])
def test_slots_of_equal_length_attend_once_without_a_mask(
    directories: dict[str, Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_decoder(directories[variant])
    layers = len(network.config.layers)
    attention = mx.fast.scaled_dot_product_attention
    calls: list[tuple[int, Any]] = []

    def counting(q: mx.array, *arguments: Any, mask: Any, **named: Any) -> mx.array:
        calls.append((q.shape[0], mask))
        return attention(q, *arguments, mask=mask, **named)

    kv = new_kv(network)
    alike = [fed(network, kv, 30) for _ in range(3)]
    other = fed(network, kv, 33)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)
    decode(network, kv, alike)
    assert calls == [(3, None)] * layers
    calls.clear()
    run_alone(network, alike[1], [5])  # alone, from its slot
    assert calls == [(1, None)] * layers
    alike[1].commit(1)
    calls.clear()
    decode(network, kv, [*alike, other])
    assert [sequences for sequences, _ in calls] == [4] * layers
    assert all(isinstance(mask, mx.array) and mask.dtype == mx.bool_ for _, mask in calls)


def test_layers_with_softcaps_attend_sequence_by_sequence(directories: dict[str, Path]) -> None:
    network = load_decoder(directories["gemma2"])
    kv = new_kv(network)
    caches = [fed(network, kv, length) for length in (5, 9)]
    decode(network, kv, caches)
    assert [cache.buffers for cache in caches] == [None, None]


def test_rows_of_different_kinds_do_not_share_slot_buffers(llama: Decoder) -> None:
    kv = new_kv(llama)
    prompt, guessing, far, alone = (fed(llama, kv, length) for length in (5, 9, CHUNK + 3, 7))
    rows: list[Work] = [(1, "decode"), (1, "decode"), (4, "decode"), (16, "prefill")]
    joined = join(kv, [alone, far, guessing, prompt], rows)
    run(llama, joined, [5] * 22)
    assert {cache.buffers for cache in (prompt, guessing, far, alone)} == {None}


def test_a_step_copies_no_entries(llama: Decoder, chunk: int) -> None:
    """Beside what is there, a step takes less than the K/V of one layer of one sequence."""
    kv = new_kv(llama)
    caches = [fed(llama, kv, 3 * chunk - 9 - number) for number in range(6)]
    decode(llama, kv, caches)
    bank = bank_of(caches[0])
    layer = bank.slot_bytes // (2 * len(llama.config.layers))
    for _ in range(3):
        mx.synchronize()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        decode(llama, kv, caches)
        assert mx.get_peak_memory() - active < 2 * layer


def test_assigning_a_slot_copies_one_layer_at_a_time(llama: Decoder, chunk: int) -> None:
    kv = new_kv(llama)
    caches = [fed(llama, kv, 3 * chunk + 9) for _ in range(6)]
    mx.synchronize()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    join(kv, caches, [(1, "decode")] * 6)
    buffer = 6 * bank_of(caches[0]).slot_bytes // (2 * len(llama.config.layers))
    assert mx.get_peak_memory() - active < 1.1 * buffer
    assert mx.get_active_memory() - active < 0.1 * buffer


def test_sequences_of_similar_length_share_slot_buffers(llama: Decoder, chunk: int) -> None:
    """However their prompts were cut: buffers have as many rows as others' have."""
    kv = new_kv(llama)
    alone = new_kv(llama)
    lengths = [(2 * chunk + 5, 4 * chunk), (3 * chunk - 1, chunk // 4)]  # and so of three chunks, and of four
    ours, theirs = ([fed(llama, each, *length) for length in lengths] for each in (kv, alone))
    assert ours[0].allocated_bytes < ours[1].allocated_bytes
    for _ in range(3):
        logits = decode(llama, kv, ours)
        assert difference(logits, mx.concatenate([run_alone(llama, cache, [5]) for cache in theirs])) < 1e-5
    assert ours[0].buffers is ours[1].buffers is not None
    assert ours[0].allocated_bytes == ours[1].allocated_bytes == bank_of(ours[0]).slot_bytes


def test_a_prefix_in_a_slot_is_shared(llama: Decoder) -> None:
    kv = new_kv(llama)
    caches = [fed(llama, kv, CHUNK - 50 + number) for number in range(3)]
    decode(llama, kv, caches)
    caches[2].cache_blocks(prompt_of(CHUNK - 48))
    other = kv.new_cache()
    assert other.load_prefix(prompt_of(CHUNK - 48)) == BLOCK
    for ours, theirs in zip(entries(other, other.firsts), entries(caches[2], other.firsts), strict=True):
        assert mx.array_equal(ours, theirs[:, :BLOCK])


def test_few_of_many_slots_are_not_attended_jointly(llama: Decoder) -> None:
    kv = new_kv(llama)
    caches = [fed(llama, kv, 9) for _ in range(5)]
    decode(llama, kv, caches)
    assert [len(members) for _, members in kv.assign(caches[1:4])] == [3]
    assert kv.assign(caches[3:]) == []


def test_slot_buffers_grow_and_shrink_with_the_batch(llama: Decoder) -> None:
    kv = new_kv(llama)
    caches = [fed(llama, kv, 9 + number) for number in range(9)]
    slots = []
    for count in (2, 3, 4, 5, 9):
        decode(llama, kv, caches[:count])
        slots.append(bank_of(caches[0]).slots)
    assert slots == [2, 4, 4, 8, 16]  # copied three times, not with everyone who comes
    bank = bank_of(caches[0])
    assert {cache.buffers for cache in caches} == {bank}
    assert [cache.slot for cache in caches] == list(range(9))
    caches.pop(3).close()
    del caches[0]  # forgotten
    decode(llama, kv, caches)
    assert sorted(cache.slot for cache in caches) == list(range(7))
    assert (bank.slots, idle_bytes(kv.shared)) == (7, 0)  # more than half of 16 were
    decode(llama, kv, caches)
    assert bank.sides[0][0].shape[0] == 7
    for cache in caches[:4]:
        cache.close()
    assert idle_bytes(kv.shared) == 4 * bank.slot_bytes
    kv.evict()
    assert (bank.slots, idle_bytes(kv.shared)) == (3, 0)


def test_idle_slots_use_spare_memory_only(llama: Decoder) -> None:
    room = [0]
    kv = new_kv(llama, lambda nbytes: room[0] - nbytes)
    caches = [fed(llama, kv, 9) for _ in range(4)]
    decode(llama, kv, caches[:2])
    decode(llama, kv, caches[:3])
    bank = bank_of(caches[0])
    assert bank.slots == 3
    room[0] = 6 * bank.slot_bytes
    decode(llama, kv, caches)
    assert bank.slots == 6
    assert excess(kv) == 0
    room[0] = 5 * bank.slot_bytes
    kv.evict()
    assert bank.slots == 4
    assert excess(kv) == -bank.slot_bytes


def test_the_last_sequence_frees_the_slot_buffers(llama: Decoder) -> None:
    gc.collect()
    kv = new_kv(llama)
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = [fed(llama, kv, 30) for _ in range(5)]
    decode(llama, kv, caches)
    assert mx.get_active_memory() - before >= 5 * bank_of(caches[0]).slot_bytes
    caches[2].leave()
    for cache in caches:
        cache.close()
    del cache, caches
    assert list(kv.shared) == []
    assert mx.get_active_memory() <= before


def test_a_growing_sequence_moves_to_larger_slot_buffers(llama: Decoder) -> None:
    kv = new_kv(llama)
    caches = [fed(llama, kv, CHUNK - 2) for _ in range(3)]
    decode(llama, kv, caches)
    small = bank_of(caches[0])
    for cache in caches[:2]:
        run_alone(llama, cache, [3, 4, 5])
        cache.commit(3)
        assert (cache.buffers, cache.slot, cache.allocated_bytes) == (None, 0, 2 * small.slot_bytes)
    decode(llama, kv, caches)
    assert bank_of(caches[0]) is bank_of(caches[1]) is not small
    assert caches[2].buffers is small
    assert (small.slots, small.used) == (1, 1)


def test_a_single_sequence_keeps_no_shared_buffers(llama: Decoder) -> None:
    """Cache of a conversation's last sequence, kept for the next prompt."""
    engine = Engine(llama, context_limit=LIMIT, keep_prefix=True)
    requests = [Request([number, 4, 7], max_tokens=4 + 20 * number) for number in range(3)]
    tokens: dict[Any, list[int]] = {engine.submit(request): [] for request in requests}
    banks = 0
    while engine.has_work:
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
        assert isinstance(engine.kv, BufferBackend)
        banks = max(banks, len(list(engine.kv.shared)))
    assert banks == 1
    assert list(engine.kv.shared) == []
    for request, said in zip(requests, tokens.values(), strict=True):
        assert said == answer(llama, request, LIMIT)[0]


def test_batching_does_not_change_output(llama: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted at any time, some cancelled, some with guesses, in memory so short that some step back."""
    monkeypatch.setattr("headrace.runtime.engine.engine.OUTPUT_RESERVED", 0)
    chance = random.Random(8)
    memory = llama.cost.kv_bytes(5 * chunk)
    engine = Engine(llama, context_limit=2 * chunk, kv_memory=memory, chunk_budget=SteadyPace(chunk))
    assert isinstance(engine.kv, BufferBackend)
    kv = engine.kv
    assign = engine.kv.assign
    together = list[int]()

    def watched(slots: Sequence[SlotCache]) -> Any:
        groups = assign(slots)
        together.extend(len(members) for _, members in groups)
        assert not idle_bytes(kv.shared) or excess(kv) <= 0
        return groups

    monkeypatch.setattr(kv, "assign", watched)
    to_come = [
        Request(prompt_of(chance.randint(chunk - 40, chunk - 10)), 45, speculate=chance.choice(["off", "ngram"]))
        for _ in range(5)
    ]
    grow_together = [Request(prompt_of(chunk - 20), 45, speculate="off") for _ in range(3)]
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
        expected = answer(llama, sequence.request, 2 * chunk)[0]
        assert said == (expected[: len(said)] if sequence in cancelled else expected)
