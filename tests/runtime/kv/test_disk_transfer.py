"""A conversation's blocks from one process to the next: the same bits, or as many of the first as are whole."""

from pathlib import Path
from shutil import copytree
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.kv.disk import DiskStore, file_names, load_blocks, store_blocks
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.ops import BLOCK, reference
from tests.support.pooled import feed, pool_of, say, table
from tests.support.tiny import load_decoder, write_model

CHAT = [(7 * i * i + 3 * i) % 96 for i in range(3 * BLOCK + 50)]
ANSWER = CHAT[3 * BLOCK - 10 :]  # the end of it
LIMIT = 6 * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-window"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_model(tmp_path_factory.mktemp("model"), request.param), reference)


def new_pool(network: Decoder, key: bytes = b"this model", entries: int = LIMIT) -> BlockPool:
    return pool_of(network, entries, key)


@pytest.fixture(scope="module")
def written(network: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's folder with CHAT in it."""
    folder = tmp_path_factory.mktemp("kv")
    pool = new_pool(network)
    store = DiskStore(folder, 1 << 30)
    cache = table(pool, LIMIT)
    feed(network, cache, CHAT[: -len(ANSWER)])
    say(network, cache, ANSWER)
    cache.cache_blocks(CHAT, end=True)
    assert store_blocks(pool, CHAT, store) == 4
    assert store_blocks(pool, CHAT, store) == 0
    return folder


@pytest.fixture
def store(written: Path, tmp_path: Path) -> DiskStore:
    return DiskStore(Path(copytree(written, tmp_path / "kv")), 1 << 30)


def back(pool: BlockPool, tokens: list[int]) -> Any:
    cache = table(pool, LIMIT)
    cache.load_prefix(tokens, answers=True)
    return cache


def rows(pool: BlockPool, cache: Any) -> list[mx.array]:
    return [
        pool.storage.read(group, block, min(BLOCK, cache.length - index * BLOCK))
        for group, table in enumerate(cache.tables)
        for index, block in list(enumerate(table))[-2:]
    ]


@pytest.mark.sampled
def test_kv_from_disk_have_the_same_bits(network: Decoder, store: DiskStore) -> None:
    first = new_pool(network)
    second = new_pool(network)
    own = table(first, LIMIT)
    feed(network, own, CHAT[: -len(ANSWER)])
    say(network, own, ANSWER)

    assert load_blocks(second, CHAT, store) == 4
    assert second.stats.used == 0
    assert load_blocks(second, CHAT, store) == 0
    cache = back(second, CHAT)
    assert cache.length == len(CHAT)
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(rows(second, cache), rows(first, own), strict=True))
    assert bool(mx.array_equal(say(network, cache, [7, 8]), say(network, own, [7, 8])))


def test_a_prompt_with_another_end_uses_the_stored_prefix(network: Decoder, store: DiskStore) -> None:
    pool = new_pool(network)
    changed = [*CHAT[: 3 * BLOCK + 9], 1, 2, 3]
    assert load_blocks(pool, changed, store) == 4
    cache = back(pool, changed)
    assert cache.length == common_prefix(changed, CHAT)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("harm", ["gone", "torn", "changed", "another's"])
def test_blocks_after_a_damaged_one_are_computed_again(
    network: Decoder, store: DiskStore, which: int, harm: str
) -> None:
    pool = new_pool(network)
    paths = [store._path(name) for name, _ in file_names(pool.index.root.key, CHAT)]
    content = bytearray(paths[which].read_bytes())
    if harm == "gone":
        paths[which].unlink()
    elif harm == "another's":
        paths[which].write_bytes(paths[which - 1].read_bytes())
    else:
        content[len(content) // 2] ^= 1
        paths[which].write_bytes(content[: len(content) // 2] if harm == "torn" else content)
    assert load_blocks(pool, CHAT, store) == which
    cache = back(pool, CHAT)
    assert cache.length <= which * BLOCK
    assert pool.stats.free + pool.stats.cached + cache.blocks == pool.stats.total


def test_other_weights_use_no_stored_block(network: Decoder, store: DiskStore) -> None:
    assert load_blocks(new_pool(network, b"other weights"), CHAT, store) == 0


def test_a_small_pool_loads_from_disk_the_blocks_that_fit(network: Decoder, store: DiskStore) -> None:
    pool = new_pool(network, entries=2 * BLOCK)
    load_blocks(pool, CHAT, store)
    assert max(blocks.cached for blocks in pool.groups) == 2
    assert pool.stats.used == 0
