"""Transfer of a conversation's blocks between a pool and the disk.

Loaded blocks are cached in the pool like computed ones, with the same bytes, after the same blocks as before.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import mlx.core as mx

from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.disk import DiskStore, StoredBlock, file_names
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.prefix_index import PrefixNode, digest
from headrace.runtime.ops import BLOCK


def never() -> bool:
    return False


def store_blocks(pool: BlockPool, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool] = never) -> int:
    """Write the pool's blocks of `tokens` that the store lacks, and return how many.

    Ends if writing fails, or if `stop()` before a block.
    """
    written = 0
    index = pool.index
    names = file_names(index.root.key, tokens)
    for (file_name, _), (node, entries) in zip(names, index.find(tokens, True), strict=False):
        if entries < len(node.tokens):  # the end of another conversation
            break
        assert node.parent is not None
        if store.has(file_name, node.key):
            continue
        if stop():
            break
        groups = tuple(_bytes(pool, group, block, entries) for group, block in enumerate(node.blocks))
        if pool.storage.shape.mixers:
            states = None
            if node.states is not None:
                states = _raw(mx.concatenate(node.states))
            groups = (*groups, states)
        if not store.put(file_name, StoredBlock(node.parent.key, node.key, node.tokens, node.decode_written, groups)):
            break
        written += 1
    return written


def load_blocks(pool: BlockPool, tokens: Sequence[int], store: DiskStore) -> int:
    """Cache the store's blocks of `tokens` that the pool lacks, until it is full, and return how many."""
    index = pool.index
    path = index.find(tokens, True)
    parent = index.root
    used = list[tuple[int, int]]()
    loaded = 0
    for number, (file_name, part) in enumerate(file_names(index.root.key, tokens)):
        if number < len(path) and path[number][1] == len(part):
            parent = path[number][0]
            continue
        block = store.get(file_name)
        if block is None or not _follows(block, parent, part):
            break
        try:
            node = _cache(pool, block, parent, used)
        except PoolFullError:
            break
        if node is None:
            break
        parent = node
        loaded += 1
    for group, number in reversed(used):
        pool.release(group, number)
    return loaded


def _follows(block: StoredBlock, parent: PrefixNode, part: Sequence[int]) -> bool:
    """Return whether it is the block of these tokens after `parent`; a partial block has to begin like them."""
    if block.parent != parent.key or block.key != digest(parent.key, block.tokens, block.decode_written):
        return False
    if len(part) < BLOCK:
        return block.tokens[:1] == tuple(part[:1])
    return block.tokens == tuple(part)


def _cache(pool: BlockPool, block: StoredBlock, parent: PrefixNode, used: list[tuple[int, int]]) -> PrefixNode | None:
    """Copy a stored block into blocks of the pool, and add them to `used`. None for sizes of another pool."""
    sizes = [mixer.sizes.state for mixer in pool.storage.shape.mixers]
    count = len(pool.groups)
    kv = block.groups[:count]
    states = block.groups[count:]
    entries = [_entries(pool, group, stored, len(block.tokens)) for group, stored in enumerate(kv)]
    if len(entries) != count or len(states) != bool(sizes):
        return None
    if any(array is None and stored is not None for array, stored in zip(entries, kv, strict=True)):
        return None
    numbers: list[int | None] = []
    for group, array in enumerate(entries):
        if array is None:
            numbers.append(None)
            continue
        number = pool.allocate(group)
        used.append((group, number))
        numbers.append(number)
        pool.storage.write(group, number, array)
    node = pool.cache_blocks(parent, block.tokens, block.decode_written, numbers)
    for stored in states:  # one at most: of all layers together
        if node is not None and stored is not None and len(stored) == 4 * sum(sizes):
            ends = list(accumulate(sizes))[:-1]
            pool.keep_states(node, list(mx.split(_array(stored).view(mx.float32), ends)))
    return node


def _bytes(pool: BlockPool, group: int, block: int | None, entries: int) -> bytes | None:
    if block is None:
        return None
    return _raw(pool.storage.read_alone(group, block, entries))


# MLX's stubs lack the buffer protocol. Importing numpy for it would take a tenth of a second.


def _raw(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array).view(mx.uint8)))  # type: ignore[arg-type]


def _array(stored: bytes) -> mx.array:
    return mx.array(memoryview(stored))  # type: ignore[arg-type]


def _entries(pool: BlockPool, group: int, stored: bytes | None, entries: int) -> mx.array | None:
    """Return stored bytes as `PagedArrays.read` returned them; None if missing or of another size."""
    storage = pool.storage
    if stored is None or group >= len(storage.windows):
        return None
    kv = storage.shape.format
    part = kv.part_shape(storage.store.groups[group].block_shape, entries)
    if len(stored) != prod(part) * kv.dtype.size:
        return None
    return _array(stored).view(kv.dtype).reshape(part)
