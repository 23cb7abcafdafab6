"""Packed K/V through all that a pool does: alone, in other chunks, behind shared blocks, of several, from disk.

One model whose layers run as one node, and two layer by layer, some and all of them with windows: the same bits, per
format. What the account says is what the arrays take.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.kv.paged import PagedPass
from headrace.runtime.ops import BLOCK, native
from headrace.runtime.ops.kv_format import FLOAT16, K8V4, Q4, Q8, KVFormat
from tests.support.alone import new_cache
from tests.support.pooled import WithPool, feed, pool_of, say, table
from tests.support.tiny import load_decoder, quantize_model, write_model

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
PROMPT = [(7 * i * i + 3 * i) % 96 for i in range(2 * BLOCK + 100)]
ANSWER = [(5 * i) % 96 for i in range(40)]  # ends behind the next block's beginning
SAID = [*PROMPT, *ANSWER]
LIMIT = 5 * BLOCK
DISTANCE = {Q8: 0.05, K8V4: 0.3, Q4: 0.6}  # of logits on average, relative to their size: weights are random


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = ["llama", "gemma3", "mistral-window"]
    return {name: quantize_model(write_model(root / "plain" / name, name), root / name) for name in names}


@pytest.fixture(params=["llama", "gemma3", "mistral-window"])
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]


@pytest.fixture(params=[Q8, K8V4, Q4], ids=lambda kv: kv.name)
def kv(request: pytest.FixtureRequest) -> KVFormat:
    found: KVFormat = request.param
    return found


@pytest.fixture
def decoder(directory: Path, kv: KVFormat) -> Decoder:
    return load_decoder(directory, native, kv=kv)


def answered(network: Any, cache: Any, prompt: Sequence[int] = PROMPT, chunk: int = 64) -> mx.array:
    feed(network, cache, prompt, chunk)
    return say(network, cache, ANSWER)


@pytest.mark.sampled(3)
def test_chunks_and_shared_prefixes_do_not_change_bits(decoder: Decoder) -> None:
    expected = answered(decoder, new_cache(decoder, LIMIT))
    network = WithPool(decoder)
    first = network.new_cache(LIMIT)
    assert mx.array_equal(answered(network, first, chunk=100), expected)
    first.cache_blocks(SAID, end=True)

    second = table(network.pool, LIMIT)
    assert second.load_prefix(SAID) == len(PROMPT)
    assert mx.array_equal(say(network, second, ANSWER), expected)
    second.trim(len(PROMPT) - BLOCK)  # into a block of the first's: a copy
    feed(network, second, PROMPT[-BLOCK:])
    assert mx.array_equal(say(network, second, ANSWER), expected)

    first.close()
    third = table(network.pool, LIMIT)
    assert third.load_prefix(SAID[:-1], answers=True) == len(SAID) - 1
    assert mx.array_equal(say(network, third, ANSWER[-1:]), expected[-1:])


def test_packed_rows_have_the_same_bits_together_and_alone(decoder: Decoder) -> None:
    pool = pool_of(decoder, 32 * BLOCK)
    parts: list[tuple[int, list[int], Any]] = [
        (200, [3], "decode"),
        (130, SAID[130:190], "prefill"),
        (7, [1, 2], "decode"),
    ]

    def filled() -> list[Any]:
        caches = []
        for length, _, _ in parts:
            caches.append(table(pool, LIMIT))
            feed(decoder, caches[-1], PROMPT[:length])
        return caches

    alone = []
    for cache, (_, tokens, phase) in zip(filled(), parts, strict=True):
        cache.reserve(len(tokens), phase)
        alone.append(decoder.layers(decoder.embed(mx.array([tokens])), cache))
        mx.eval(alone)
    rows = [PassRow(cache.cache, len(tokens), phase) for cache, (_, tokens, phase) in zip(filled(), parts, strict=True)]
    joined = PagedPass(rows)
    x = decoder.embed(mx.array([[token for _, tokens, _ in parts for token in tokens]]))
    assert mx.array_equal(decoder.layers(x, joined), mx.concatenate(alone, axis=1))


def test_kv_from_disk_have_the_same_bits(decoder: Decoder, tmp_path: Path) -> None:
    first, second = (pool_of(decoder, LIMIT, b"key") for _ in range(2))
    store = DiskStore(tmp_path, 1 << 30)
    cache = table(first, LIMIT)
    answered(decoder, cache)
    cache.cache_blocks(SAID, end=True)
    assert store_blocks(first, SAID, store) == load_blocks(second, SAID, store) == 4
    back = table(second, LIMIT)
    assert back.load_prefix(SAID, answers=True) == len(SAID)
    assert mx.array_equal(say(decoder, back, [7, 8]), say(decoder, cache, [7, 8]))


def test_no_bytes_of_other_sequences_are_written_to_disk(decoder: Decoder, tmp_path: Path) -> None:
    for name, before in (("fresh", []), ("used", [5] * (4 * BLOCK))):
        pool = pool_of(decoder, LIMIT, b"key")
        if before:
            another = table(pool, LIMIT)
            feed(decoder, another, before)
            another.close()
        cache = table(pool, LIMIT)
        answered(decoder, cache)
        cache.cache_blocks(SAID, end=True)
        assert store_blocks(pool, SAID, DiskStore(tmp_path / name, 1 << 30)) == 4
    fresh, used = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("fresh", "used"))
    assert fresh == used


@pytest.mark.sampled(3)
def test_output_is_close_to_half_precision(directory: Path, kv: KVFormat) -> None:
    plain, packed = (load_decoder(directory, native, kv=form) for form in (FLOAT16, kv))
    theirs, ours = (answered(network, new_cache(network, LIMIT)) for network in (plain, packed))
    assert 0 < mx.abs(ours - theirs).mean() < DISTANCE[kv] * mx.abs(theirs).mean()


def test_counted_bytes_equal_those_of_the_arrays(decoder: Decoder) -> None:
    pool = pool_of(decoder, LIMIT)
    table(pool, LIMIT).reserve(LIMIT)
    held = {id(group): sum(slab.nbytes for slab in group.slabs) for group in pool.storage.store.groups}
    entries = {id(group): group.blocks * BLOCK * len(group.layers) for group in pool.storage.store.groups}
    rows = {nbytes / entries[group] for group, nbytes in held.items()}
    kinds = decoder.kv_shape.kinds
    assert rows == {decoder.kv_shape.row_bytes(kind) for kind in kinds if kind is not None}
    assert decoder.cost.kv_bytes_per_token == decoder.kv_shape.bytes_per_token
