"""Blocks of recent conversations on disk: files that can be wrong, torn or gone, and then are as if never written.

Contract: `get` gives exactly what a `put` was given, or None. A file is written under another name first, so that it is
there whole or not at all, and ends in a digest of all the rest. The store never takes more than `most` bytes for longer
than between two calls of `trim`; what was neither written nor read for longest goes first. Several processes may use
one folder. What cannot be written is not: nobody is told, since all of it can be computed again.

A file is named by its tokens and all before them (`places`), so that whoever has the tokens knows where to look.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import calcsize, error, pack, unpack_from

from headrace.runtime.kv.chain import digest
from headrace.runtime.ops import BLOCK

_MAGIC = b"headkv\0\2"
_KEY = 16  # bytes of keys and of the digest at the end
_HEAD = f"<{_KEY}s{_KEY}sHH"
_ABSENT = 2**64 - 1
_STALE_S = 3600.0  # a file half written by a process that has died


@dataclass(frozen=True, slots=True)
class Stored:
    """A block as `Link` has it: its key and that of the block before, its entries, and the bytes of each layer group.

    None in `groups`: that group's window had left the block.
    """

    before: bytes
    key: bytes
    tokens: tuple[int, ...]
    answered: bytes
    groups: tuple[bytes | None, ...]


def places(root: bytes, tokens: Sequence[int]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Where each block of `tokens` is kept, and its tokens; root: of whose K/V (`Chains.root.key`).

    The last one, that is not full, is where every such end of the same beginning is: the newest is kept.
    """
    place = root
    for start in range(0, len(tokens), BLOCK):
        part = tokens[start : start + BLOCK]
        if len(part) < BLOCK:
            yield digest(place, (), b"end"), part
            return
        place = digest(place, part, b"")
        yield place, part


class DiskStore:
    """The files of one folder, `most` bytes of them."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most

    def has(self, place: bytes, key: bytes) -> bool:
        """Whether a file there seems to hold the block of that key; then it counts as used."""
        path = self._path(place)
        try:
            with path.open("rb") as file:
                start = file.read(len(_MAGIC) + calcsize(_HEAD))
            if start[: len(_MAGIC)] != _MAGIC or unpack_from(_HEAD, start, len(_MAGIC))[1] != key:
                return False
            os.utime(path)
        except (OSError, error):
            return False
        return True

    def put(self, place: bytes, block: Stored) -> bool:
        """Keep a block; whether that worked."""
        path = self._path(place)
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

    def get(self, place: bytes) -> Stored | None:
        """What is kept there; None for nothing, or nothing whole."""
        path = self._path(place)
        try:
            content = memoryview(path.read_bytes())
            with contextlib.suppress(OSError):
                os.utime(path)
        except OSError:
            return None
        if blake2b(content[:-_KEY], digest_size=_KEY).digest() != content[-_KEY:]:
            return None
        try:
            return _parsed(content[:-_KEY])
        except (error, ValueError):
            return None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def trim(self) -> None:
        """Delete what is too much, and what others left half written."""
        total, now = 0, time.time()
        for used, size, path in sorted(self._files(), reverse=True):
            half = bool(path.suffix)
            if not half:
                total += size
            if total > self._most or (half and now - used > _STALE_S):
                with contextlib.suppress(OSError):
                    path.unlink()

    def clear(self) -> None:
        """Delete everything."""
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of each."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # deleted by another process meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        return found

    def _path(self, place: bytes) -> Path:
        return self._folder / place.hex()


def _head(block: Stored) -> Iterator[bytes]:
    yield pack(_HEAD, block.before, block.key, len(block.tokens), len(block.groups))
    yield pack(f"<{len(block.groups)}Q", *(_ABSENT if group is None else len(group) for group in block.groups))
    yield pack(f"<{len(block.tokens)}q", *block.tokens)
    yield block.answered


def _parsed(content: memoryview) -> Stored:
    """Raises struct.error or ValueError for what `put` did not write."""
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("another kind of file")
    at = len(_MAGIC)
    before, key, entries, count = unpack_from(_HEAD, content, at)
    at += calcsize(_HEAD)
    sizes = unpack_from(f"<{count}Q", content, at)
    at += 8 * count
    tokens = unpack_from(f"<{entries}q", content, at)
    at += 8 * entries
    answered = bytes(content[at : at + entries])
    at += entries
    groups: list[bytes | None] = []
    for size in sizes:
        groups.append(None if size == _ABSENT else bytes(content[at : at + size]))
        at += 0 if size == _ABSENT else size
    if at != len(content) or len(answered) != entries:
        raise ValueError("not as long as it says")
    return Stored(before, key, tokens, answered, tuple(groups))
