"""The K/V of recent chats on disk, so that one which is opened again is not prefilled again.

What was said is written when nobody waits, or in the second after a chat was left, block by block; `bring_back` reads
what a prompt begins with and the engine does not have. Nothing depends on it: what is not there, or damaged, is
computed. Deleting a session deletes all of it (`app.sessions.kept`), as it holds what was said.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.app.config.settings import ChatSettings, load_settings
from headrace.app.versions import versions
from headrace.runtime import ops
from headrace.runtime.config.paths import kept_chats_dir
from headrace.runtime.engine.engine import Engine
from headrace.runtime.errors import HeadraceError
from headrace.runtime.kv import kept_chats
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.network import Network

_CHATS = 8  # that wait to be written; more come only from many answers at once


class KeptChats:
    """Those of one engine. most: bytes on disk; 0 keeps none."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._store = DiskStore(kept_chats_dir(), most)
        self._unwritten: list[list[int]] = []  # oldest first

    def said(self, tokens: Sequence[int]) -> None:
        """The tokens of a conversation that has been answered."""
        if self._most and (pool := self._engine.caches.pool) is not None:
            fitting = self._most // pool.slabs.shape.bytes_per_token
            self._unwritten = [*self._unwritten[1 - _CHATS :], list(tokens[:fitting])]

    @property
    def due(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._unwritten)

    def write(self, stop: Callable[[], bool]) -> None:
        """Write what was said, until `stop()`: it is asked before every block, and then the rest waits."""
        while self._unwritten and (pool := self._engine.caches.pool) is not None:
            kept_chats.keep(pool, self._unwritten[-1], self._store, stop)
            if stop():
                return
            self._unwritten.pop()
        self._store.trim()

    def bring_back(self, prompt: Sequence[int]) -> None:
        """Read what there is of a prompt that is about to be answered."""
        if self._most and (pool := self._engine.caches.pool) is not None:
            kept_chats.bring_back(pool, prompt[:-1], self._store)


def kept_bytes() -> int:
    """What the settings allow. A file that cannot be read is for the chat to complain of."""
    try:
        chat = load_settings().chat
    except HeadraceError:
        chat = ChatSettings()
    return int(chat.kept_gb * 1e9)


def kv_key(model: Path, network: Network[Any]) -> bytes:
    """What must be the same for K/V to be: the model's files, and all that decides how they are computed with."""
    key = blake2b(digest_size=16)
    for file in sorted(model.glob("*")):
        stat = file.stat()
        key.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    status = ops.native.status()
    shape = getattr(network, "kv_shape", None)
    numerics = shape, ops.describe()["kernels"], status.instruction_set, ops.native.exact(), versions()
    key.update(f"{model.resolve()} {numerics}".encode())
    return key.digest()
