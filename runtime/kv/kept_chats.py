"""Between a pool and the disk: the blocks of a conversation, kept from one process to the next.

What comes back is published like any other block, so that a lookup finds it; its bytes are those that were written, and
it goes behind the very blocks that it was computed behind, or not at all.
"""

from collections.abc import Callable, Sequence
from math import prod

import mlx.core as mx
import numpy as np

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.chain import Link, digest
from headrace.runtime.kv.disk import DiskStore, Stored, places
from headrace.runtime.kv.paged_cache import KVPool
from headrace.runtime.ops import BLOCK


def never() -> bool:
    return False


def keep(pool: KVPool, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool] = never) -> int:
    """Write what the pool has of `tokens` and the store has not: how many blocks.

    Ends where writing fails, and before a block where `stop()` says so.
    """
    written = 0
    chains = pool.blocks.chains
    for (place, _), (link, entries) in zip(places(chains.root.key, tokens), chains.find(tokens, True), strict=False):
        if entries < len(link.tokens):  # the end of another conversation
            break
        assert link.before is not None
        if store.has(place, link.key):
            continue
        if stop():
            break
        groups = tuple(_stored(pool, group, block, entries) for group, block in enumerate(link.blocks))
        if not store.put(place, Stored(link.before.key, link.key, link.tokens, link.answered, groups)):
            break
        written += 1
    return written


def bring_back(pool: KVPool, tokens: Sequence[int], store: DiskStore) -> int:
    """Publish what the store has of `tokens` and the pool has not: how many blocks. Stops where the pool is full."""
    chains = pool.blocks.chains
    way = chains.find(tokens, True)
    before, held, brought = chains.root, list[tuple[int, int]](), 0
    for index, (place, part) in enumerate(places(chains.root.key, tokens)):
        if index < len(way) and way[index][1] == len(part):
            before = way[index][0]
            continue
        block = store.get(place)
        if block is None or not _follows(block, before, part):
            break
        try:
            link = _publish(pool, block, before, held)
        except PoolFullError:
            break
        if link is None:
            break
        before, brought = link, brought + 1
    for group, number in reversed(held):
        pool.blocks.release(group, number)
    return brought


def _follows(block: Stored, before: Link, part: Sequence[int]) -> bool:
    """Whether it is the block of these tokens (an end: whether it begins like them), computed behind `before`."""
    if block.before != before.key or block.key != digest(before.key, block.tokens, block.answered):
        return False
    same = len(part) if len(part) == BLOCK else 1
    return block.tokens[:same] == tuple(part[:same])


def _publish(pool: KVPool, block: Stored, before: Link, held: list[tuple[int, int]]) -> Link | None:
    """Its bytes into blocks of the pool, which go to `held`. None for sizes that are not this pool's."""
    entries = [_entries(pool, group, stored, len(block.tokens)) for group, stored in enumerate(block.groups)]
    if len(entries) != len(pool.blocks.groups) or any(
        array is None and stored is not None for array, stored in zip(entries, block.groups, strict=True)
    ):
        return None
    numbers: list[int | None] = []
    for group, array in enumerate(entries):
        if array is None:
            numbers.append(None)
            continue
        number = pool.blocks.allocate(group)
        held.append((group, number))
        numbers.append(number)
        pool.slabs.write(group, number, array)
    return pool.blocks.publish(before, block.tokens, block.answered, numbers)


def _stored(pool: KVPool, group: int, block: int | None, entries: int) -> bytes | None:
    if block is None:
        return None
    held = mx.contiguous(pool.slabs.read_alone(group, block, entries))
    return np.array(held.view(mx.uint8), copy=False).tobytes()


def _entries(pool: KVPool, group: int, stored: bytes | None, entries: int) -> mx.array | None:
    """What `Slabs.read` gave, of stored bytes; None where there are none, or not as many."""
    if stored is None or group >= len(pool.slabs.windows):
        return None
    kv = pool.slabs.shape.format
    part = kv.part_shape(pool.slabs.store.groups[group].block_shape, entries)
    if len(stored) != prod(part) * kv.dtype.size:
        return None
    return mx.array(np.frombuffer(stored, np.uint8)).view(kv.dtype).reshape(part)
