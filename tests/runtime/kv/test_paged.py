"""Sequences in blocks of one pool hold and say what sequences with buffers of their own do: bit for bit, natively."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.kv.paged import NO_BLOCK, PagedPass
from headrace.runtime.kv.slot_cache import SlotCache
from headrace.runtime.ops import BLOCK, native, reference
from tests.support.alone import Alone
from tests.support.kernels import KERNELS, tolerance
from tests.support.pooled import WithPool, feed, say, table
from tests.support.tiny import load_decoder, quantize_model, write_model

VARIANTS = ["llama", "qwen3", "gemma3", "mistral-window"]  # fused whole, and layer by layer; some and all with windows
PROMPT = [(7 * i * i + 3 * i) % 96 for i in range(2 * BLOCK + 100)]
ANSWER = [(5 * i) % 96 for i in range(40)]  # ends behind the next block's beginning
LIMIT = 5 * BLOCK


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    plain = {name: write_model(root / name, name) for name in VARIANTS}
    return plain | {"llama-quantized": quantize_model(plain["llama"], root / "quantized")}


@dataclass(frozen=True)
class Case:
    """bits: rows do not depend on how many are beside them, as of rounded weights on the native kernels."""

    decoder: Decoder
    bits: bool

    def same(self, a: mx.array, b: mx.array) -> bool:
        if self.bits:
            return bool(mx.array_equal(a, b))
        return bool(mx.allclose(a, b, rtol=0, atol=tolerance(self.decoder.ops) * float(mx.abs(b).max())))


@pytest.fixture(params=[(ops, name) for ops in KERNELS for name in [*VARIANTS, "llama-quantized"]],
                ids=lambda param: f"{param[1]}-{param[0].name}")  # fmt: skip
def case(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Case:
    ops, name = request.param
    return Case(load_decoder(directories[name], ops), bits=ops is native and name == "llama-quantized")


def in_buffers(decoder: Decoder) -> Any:
    return Alone(SlotCache(decoder.kv_shape, decoder.ops, LIMIT))


def rows(cache: Any, network: WithPool) -> Iterator[tuple[int, mx.array]]:
    """For each layer the first entry that is there, and K and V (2, Hkv, entries, D) from it on."""
    mx.eval(cache.arrays)
    store = network.pool.storage.store
    for group, place in store.locations:
        blocks = [store.block(group, block)[place] for block in cache.tables[group] if block != NO_BLOCK]
        first = cache.dropped[group] * BLOCK
        yield first, mx.concatenate(blocks, axis=2)[:, :, : cache.committed - first]


def same_rows(cache: Any, network: WithPool, own: Any, case: Case) -> bool:
    held = own.arrays
    layers = len(held) // 2
    for layer, (first, ours) in enumerate(rows(cache, network)):
        theirs = mx.stack([held[layer][0], held[layers + layer][0]])
        start = max(first, own.firsts[layer])
        theirs = theirs[:, :, start - own.firsts[layer] : cache.committed - own.firsts[layer]]
        if not case.same(ours[:, :, start - first :].astype(mx.float32), theirs.astype(mx.float32)):
            return False
    return True


@pytest.mark.sampled
def test_blocks_and_shared_prefixes_do_not_change_bits(case: Case) -> None:
    """Logits and K/V rows: buffers, blocks, other chunks, blocks of another, a part of a block, an answer's blocks."""
    decoder = case.decoder
    own = in_buffers(decoder)
    feed(decoder, own, PROMPT)
    expected = say(decoder, own, ANSWER)

    network = WithPool(decoder)
    first = network.new_cache(LIMIT)
    assert first.tables[0] == [3]  # what comes next are 0, 1, 2
    feed(network, first, PROMPT, chunk=100)
    assert case.same(say(network, first, ANSWER), expected)
    assert same_rows(first, network, own, case)
    said = [*PROMPT, *ANSWER]
    first.cache_blocks(said, end=True)

    second = table(network.pool, LIMIT)
    assert second.load_prefix(said) == len(PROMPT)
    assert case.same(say(network, second, ANSWER), expected)
    assert same_rows(second, network, own, case)

    first.close()
    third = table(network.pool, LIMIT)
    assert third.load_prefix(said[:-1], answers=True) == len(said) - 1
    assert case.same(say(network, third, ANSWER[-1:]), expected[-1:])
    assert same_rows(third, network, own, case)


@pytest.mark.sampled
def test_rollback_into_a_shared_block_copies_it(case: Case) -> None:
    decoder = case.decoder
    network = WithPool(decoder)
    first = network.new_cache(LIMIT)
    feed(network, first, PROMPT)
    first.cache_blocks(PROMPT)
    second = table(network.pool, LIMIT)
    second.load_prefix(PROMPT)
    second.trim(len(PROMPT) - BLOCK)
    feed(network, second, ANSWER)
    own = in_buffers(decoder)
    feed(decoder, own, PROMPT)
    assert same_rows(first, network, own, case)
    own.trim(len(PROMPT) - BLOCK)
    feed(decoder, own, ANSWER)
    assert same_rows(second, network, own, case)


@pytest.mark.sampled
def test_rows_have_the_same_bits_together_and_alone(case: Case) -> None:
    """A decode row, a chunk of a prompt, a first chunk, two sequences behind one prefix: as each alone."""
    network = WithPool(case.decoder)
    parts: list[tuple[list[int], list[int], Any]] = [
        (PROMPT[:200], ANSWER[:1], "decode"),
        (PROMPT[:BLOCK], ANSWER[:37], "prefill"),
        ([], PROMPT[:5], "prefill"),
        (PROMPT[:150], [9], "decode"),
    ]

    def filled(before: list[int]) -> Any:
        cache = network.new_cache(LIMIT) if not before else table(network.pool, LIMIT)
        feed(network, cache, before[cache.load_prefix(before) :])
        cache.cache_blocks(before, end=True)
        return cache

    alone = []
    for before, tokens, phase in parts:
        cache = filled(before)
        cache.reserve(len(tokens), phase)
        alone.append(network.layers(network.embed(mx.array([tokens])), cache))
        mx.eval(alone)
        cache.close()
    network.pool.clear()
    assert network.pool.storage.nbytes == 0

    caches = [filled(before) for before, _, _ in parts]
    one = PagedPass(
        [PassRow(cache.cache, len(tokens), phase) for cache, (_, tokens, phase) in zip(caches, parts, strict=True)]
    )
    together = network.layers(network.embed(mx.array([[token for _, tokens, _ in parts for token in tokens]])), one)
    assert case.same(together, mx.concatenate(alone, axis=1))
    assert network.pool.stats.shared > 0


def test_memory_is_allocated_and_freed_by_the_slab(directories: dict[str, Path]) -> None:
    network = WithPool(load_decoder(directories["gemma3"], reference))
    pool = network.pool
    caches = [table(pool, LIMIT) for _ in range(4)]
    for cache in caches:
        cache.reserve(LIMIT)
        cache.advance(LIMIT)
        assert cache.allocated_bytes == LIMIT * network.kv_shape.bytes_per_token
    assert pool.storage.nbytes >= sum(cache.allocated_bytes for cache in caches)
    caches[3].close()
    before = pool.storage.nbytes
    pool.clear()
    assert sum(cache.allocated_bytes for cache in caches) <= pool.storage.nbytes < before
    for cache in caches:
        cache.close()
    pool.clear()
    assert (pool.storage.nbytes, pool.stats.total) == (0, 0)
