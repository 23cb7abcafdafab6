"""A conversation's blocks from one process to the next: the same bits, or as many of the first as are whole."""

from pathlib import Path
from shutil import copytree

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.disk import DiskStore, places
from headrace.runtime.kv.kept_chats import bring_back, keep
from headrace.runtime.kv.paged_cache import KVPool, PagedCache
from headrace.runtime.kv.prefix import common_prefix
from headrace.runtime.ops import BLOCK, reference
from tests.pooled import feed, say
from tests.tiny import load_decoder, write_model

CHAT = [(7 * i * i + 3 * i) % 96 for i in range(3 * BLOCK + 50)]
ANSWER = CHAT[3 * BLOCK - 10 :]  # the end of it
LIMIT = 6 * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-window"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_model(tmp_path_factory.mktemp("model"), request.param), reference)


def new_pool(network: Decoder, key: bytes = b"this model", entries: int = LIMIT) -> KVPool:
    return KVPool(network.kv_shape, network.ops, entries, key)


@pytest.fixture(scope="module")
def written(network: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's folder with CHAT in it."""
    folder = tmp_path_factory.mktemp("kv")
    pool, store = new_pool(network), DiskStore(folder, 1 << 30)
    cache = pool.make_cache(LIMIT)
    feed(network, cache, CHAT[: -len(ANSWER)])
    say(network, cache, ANSWER)
    cache.publish(CHAT, end=True)
    assert keep(pool, CHAT, store) == 4
    assert keep(pool, CHAT, store) == 0
    return folder


@pytest.fixture
def store(written: Path, tmp_path: Path) -> DiskStore:
    return DiskStore(Path(copytree(written, tmp_path / "kv")), 1 << 30)


def back(pool: KVPool, tokens: list[int]) -> PagedCache:
    cache = pool.make_cache(LIMIT)
    cache.resume(tokens, answers=True)
    return cache


def rows(pool: KVPool, cache: PagedCache) -> list[mx.array]:
    return [
        pool.slabs.read(group, block, min(BLOCK, cache.length - index * BLOCK))
        for group, table in enumerate(cache.tables)
        for index, block in list(enumerate(table))[-2:]
    ]


def test_it_comes_back_bit_for_bit(network: Decoder, store: DiskStore) -> None:
    first, second = new_pool(network), new_pool(network)
    own = first.make_cache(LIMIT)
    feed(network, own, CHAT[: -len(ANSWER)])
    say(network, own, ANSWER)

    assert bring_back(second, CHAT, store) == 4
    assert second.blocks.stats.used == 0
    assert bring_back(second, CHAT, store) == 0
    cache = back(second, CHAT)
    assert cache.length == len(CHAT)
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(rows(second, cache), rows(first, own), strict=True))
    assert bool(mx.array_equal(say(network, cache, [7, 8]), say(network, own, [7, 8])))


def test_another_end_takes_the_same_beginning(network: Decoder, store: DiskStore) -> None:
    pool = new_pool(network)
    changed = [*CHAT[: 3 * BLOCK + 9], 1, 2, 3]
    assert bring_back(pool, changed, store) == 4
    cache = back(pool, changed)
    assert cache.length == common_prefix(changed, CHAT)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("harm", ["gone", "torn", "changed", "another's"])
def test_what_is_behind_a_harmed_block_is_computed_again(
    network: Decoder, store: DiskStore, which: int, harm: str
) -> None:
    pool = new_pool(network)
    paths = [store._path(place) for place, _ in places(pool.blocks.chains.root.key, CHAT)]
    content = bytearray(paths[which].read_bytes())
    if harm == "gone":
        paths[which].unlink()
    elif harm == "another's":
        paths[which].write_bytes(paths[which - 1].read_bytes())
    else:
        content[len(content) // 2] ^= 1
        paths[which].write_bytes(content[: len(content) // 2] if harm == "torn" else content)
    assert bring_back(pool, CHAT, store) == which
    cache = back(pool, CHAT)
    assert cache.length <= which * BLOCK
    assert pool.blocks.stats.free + pool.blocks.stats.cached + cache.blocks == pool.blocks.stats.total


def test_other_weights_find_nothing(network: Decoder, store: DiskStore) -> None:
    assert bring_back(new_pool(network, b"other weights"), CHAT, store) == 0


def test_a_small_pool_takes_what_fits(network: Decoder, store: DiskStore) -> None:
    pool = new_pool(network, entries=2 * BLOCK)
    bring_back(pool, CHAT, store)
    assert max(blocks.cached for blocks in pool.blocks.groups) == 2
    assert pool.blocks.stats.used == 0
