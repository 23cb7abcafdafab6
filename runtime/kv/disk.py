"""K/V blocks of recent conversations on disk, and their transfer to and from a pool.

Contract: `get` returns exactly the block of a `put`, or None for missing, torn or changed files. A file is written
under another name first, and ends in a digest of its content. `trim` deletes the least recently used files beyond
`max_bytes`. Several processes may use one folder. Write errors are not raised: the blocks can be computed again.

Files are named by their tokens and all tokens before (`file_names`). Blocks that are loaded are cached in the pool like
computed ones, with the same bytes, after the same blocks as before.

A file, in little endian (`_head`, `_parsed`):

    magic | parent's key, key, number of entries, number of groups | bytes of each group | tokens | phases
          | content of each group | digest of all before

Another layout needs another last byte of `_MAGIC`: files of older versions are then removed as damaged. The engine
process keeps the newest conversations there (`app/engine/kv_disk_cache.py`). Guards: tests/runtime/kv/test_disk.py and
test_disk_transfer.py, and the fuzz target `kv`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import prod
from pathlib import Path
from struct import calcsize, error, pack, unpack_from

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.config.files import open_regular, read_regular
from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.prefix_index import PrefixNode, digest
from headrace.runtime.ops import BLOCK

_MAGIC = b"headkv\0\3"  # ends in the version of the layout
_LARGEST = 1 << 30  # bytes of a file that is read: far above a block of any model
_KEY = 16  # bytes of keys (`prefix_index.digest`), and of the digest at the end
_HEAD = f"<{_KEY}s{_KEY}sHH"  # parent's key, key, number of entries, number of groups
_ABSENT = 2**64 - 1  # in place of the bytes of a group that has no block
_STALE_S = 3600.0  # age from which a partial file is of a process that died


class StoredBlock(Struct, frozen=True):
    """A block of a `PrefixNode`.

    parent, key: keys of the node before it, and of itself.
    tokens: of its entries, 1 to BLOCK.
    decode_written: of each entry, 1 for a decode step, 0 for prefill.
    groups: bytes of each layer group, None where the block is outside the group's window; then, for a network with
        recurrent layers, the bytes of their states, None where they were not kept.
    """

    parent: bytes
    key: bytes
    tokens: tuple[int, ...]
    decode_written: bytes
    groups: tuple[bytes | None, ...]


def file_names(root: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Yield the name of the file, and the tokens, of each block of `tokens`; root: the key of `PrefixIndex.root`.

    All partial last blocks after the same beginning have one name; the newest is kept.
    """
    key = root
    for start in range(0, len(tokens), BLOCK):
        part = tokens[start : start + BLOCK]
        if len(part) < BLOCK:
            yield digest(key, (), b"end"), part
            return
        key = digest(key, part, b"")
        yield key, part


class DiskStore:
    """The files of one folder, `max_bytes` of them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def has(self, name: bytes, key: bytes) -> bool:
        """Return whether the file's head has that key, and mark it as used."""
        path = self._path(name)
        try:
            with open_regular(path, _LARGEST) as file:
                start = file.read(len(_MAGIC) + calcsize(_HEAD))
            _, stored_key, *_ = unpack_from(_HEAD, start, len(_MAGIC))
            if start[: len(_MAGIC)] != _MAGIC or stored_key != key:
                return False
            os.utime(path)
        except (OSError, ValueError, error):
            return False
        return True

    def put(self, name: bytes, block: StoredBlock) -> bool:
        """Write a block; return whether that succeeded."""
        path = self._path(name)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        parts = [_MAGIC, *_head(block), *(group for group in block.groups if group is not None)]
        check = blake2b(digest_size=_KEY)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for part in parts:
                    check.update(part)
                    file.write(part)
                file.write(check.digest())
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True

    def get(self, name: bytes) -> StoredBlock | None:
        """Read a block; None if there is none. A damaged file is deleted, so that the block is written again."""
        path = self._path(name)
        try:
            content = memoryview(read_regular(path, _LARGEST))
            with contextlib.suppress(OSError):
                os.utime(path)
        except (OSError, ValueError):
            return None
        try:
            if blake2b(content[:-_KEY], digest_size=_KEY).digest() != content[-_KEY:]:
                raise ValueError("not the content that was written")
            return _parsed(content[:-_KEY])
        except (error, ValueError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def trim(self) -> None:
        """Delete the least recently used files beyond `max_bytes`, and stale partial files."""
        total = 0
        now = time.time()
        for used, size, path in sorted(self._files(), reverse=True):
            partial = bool(path.suffix)  # HEXNAME.PID, see `put`
            if not partial:
                total += size
            if total > self._max_bytes or (partial and now - used > _STALE_S):
                with contextlib.suppress(OSError):
                    path.unlink()

    def clear(self) -> None:
        """Delete all files."""
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, path) of each file, partial ones included; last use in seconds since the epoch."""
        files = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # deleted by another process meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    files.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        return files

    def _path(self, name: bytes) -> Path:
        return self._folder / name.hex()


def _head(block: StoredBlock) -> Iterator[bytes]:
    """Yield the parts of a file between the magic and the content of the groups; `_parsed` reads them."""
    yield pack(_HEAD, block.parent, block.key, len(block.tokens), len(block.groups))
    yield pack(f"<{len(block.groups)}Q", *(_ABSENT if group is None else len(group) for group in block.groups))
    yield pack(f"<{len(block.tokens)}q", *block.tokens)
    yield block.decode_written


def _parsed(content: memoryview) -> StoredBlock:
    """Parse a file without its digest. Raises struct.error or ValueError for other content."""
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("another kind of file")
    at = len(_MAGIC)
    parent, key, entries, count = unpack_from(_HEAD, content, at)
    at += calcsize(_HEAD)
    sizes = unpack_from(f"<{count}Q", content, at)
    at += 8 * count
    tokens = unpack_from(f"<{entries}q", content, at)
    at += 8 * entries
    decode_written = bytes(content[at : at + entries])
    at += entries
    groups: list[bytes | None] = []
    for size in sizes:
        if size == _ABSENT:
            groups.append(None)
            continue
        groups.append(bytes(content[at : at + size]))
        at += size
    if at != len(content) or len(decode_written) != entries:
        raise ValueError("not as long as it says")
    return StoredBlock(parent, key, tokens, decode_written, tuple(groups))


def never() -> bool:
    """Return False: the `stop` of writing that does not end early."""
    return False


def store_blocks(pool: BlockPool, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool] = never) -> int:
    """Write the pool's blocks of `tokens` that the store lacks, and return how many.

    Ends if writing fails, or if `stop()` returns True before a block.
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
    """Cache the store's blocks of `tokens` that the pool lacks, until it is full, and return how many were read.

    Of a pool without K/V, those after the last stored state do not stay.
    """
    index = pool.index
    path = index.find(tokens, True)
    parent = index.root
    used = list[tuple[int, int]]()  # (group, block): in use until the end, so that later blocks do not evict them
    loaded = 0
    for number, (file_name, part) in enumerate(file_names(index.root.key, tokens)):
        if number < len(path):
            known, entries = path[number]
            if entries == len(part):
                parent = known
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
    for group, number in reversed(used):  # the last block first, as a sequence does: it is evicted first
        pool.release(group, number)
    pool.prune(parent)
    return loaded


def _follows(block: StoredBlock, parent: PrefixNode, part: Sequence[int]) -> bool:
    """Return whether it is the block of these tokens after `parent`; a partial block has to begin like them."""
    if block.parent != parent.key or block.key != digest(parent.key, block.tokens, block.decode_written):
        return False
    if len(part) < BLOCK:
        return block.tokens[:1] == tuple(part[:1])
    return block.tokens == tuple(part)


def _cache(pool: BlockPool, block: StoredBlock, parent: PrefixNode, used: list[tuple[int, int]]) -> PrefixNode | None:
    """Copy a stored block into blocks of the pool, and return their node; None for sizes of another pool.

    parent: the node of the block before.
    used: gets (group, number) of the blocks, which the caller releases.
    """
    sizes = [mixer.sizes.state for mixer in pool.storage.shape.mixers]
    count = len(pool.groups)
    kv = block.groups[:count]
    states = block.groups[count:]
    # Sizes are compared before anything is copied: bytes of another shape would become K/V of this network.
    entries = [_entries(pool, group, stored, len(block.tokens)) for group, stored in enumerate(kv)]
    if len(entries) != count or len(states) != bool(sizes):
        return None
    if any(array is None and stored is not None for array, stored in zip(entries, kv, strict=True)):
        return None
    # Copy the entries, then make them available to lookups.
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
    """Return a block's first entries as bytes, without content of other sequences; None for no block (`block` None)."""
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
