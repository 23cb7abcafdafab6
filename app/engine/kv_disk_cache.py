"""Disk cache of recent chats' K/V, so that a reopened chat is not prefilled again.

`EngineHost` and `headrace run` use it. Blocks are written while the engine is idle, or at its end, for a second at most
(`client._LAST_S`, `run.answer._WRITE_S`). Missing or damaged blocks are computed again. Deleting a session clears the
whole cache (`app.sessions.kv_cache`), which contains its text.

Guards: tests/app/engine/test_kv_disk_cache.py; for the key, tests/models/network/test_activations.py and
test_adapters.py.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

from headrace import models, runtime
from headrace.app.config.settings import ChatSettings, load_settings
from headrace.app.versions import versions
from headrace.models.checkpoint.adapter import Adapter
from headrace.runtime import ops
from headrace.runtime.config.paths import chats_cleared_file, kept_chats_dir
from headrace.runtime.engine.engine import Engine
from headrace.runtime.errors import HeadraceError
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.network import Network

_MAX_PENDING = 8  # conversations that wait to be written


class KVDiskCache:
    """The cache of one engine. max_bytes: on disk; 0 disables it."""

    def __init__(self, engine: Engine, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._store = DiskStore(kept_chats_dir(), max_bytes)
        self._pending: list[tuple[int, list[int]]] = []  # when they were answered (ns since the epoch), oldest first

    def add(self, tokens: Sequence[int]) -> None:
        """Queue the tokens of an answered conversation."""
        if self._max_bytes:
            fitting = self._engine.network.cost.longest_context(self._max_bytes, len(tokens))
            newest = self._pending[1 - _MAX_PENDING :]  # room for one more
            self._pending = [*newest, (time.time_ns(), list(tokens[:fitting]))]

    @property
    def write_due(self) -> bool:
        return bool(self._pending)

    def write(self, stop: Callable[[], bool]) -> None:
        """Write the queue, newest first, until `stop()`, which is called before every file; the rest stays queued.

        Conversations that were answered before the cache was deleted are left out: one of them may be deleted.
        """
        if not self._pending:
            return
        while self._pending:
            answered_ns, tokens = self._pending[-1]
            self._engine.kv.store(tokens, self._store, partial(_ends, stop, answered_ns))
            if stop():  # perhaps within this conversation: it stays queued
                return
            self._pending.pop()
        self._store.trim()

    def load(self, prompt: Sequence[int]) -> None:
        """Load the cached prefix of a prompt."""
        if self._max_bytes:
            self._engine.kv.load(prompt[:-1], self._store)


def _ends(stop: Callable[[], bool], answered_ns: int) -> bool:
    """Return whether to stop writing a conversation that was answered then."""
    if stop():
        return True
    try:
        return chats_cleared_file().stat().st_mtime_ns > answered_ns
    except OSError:  # never cleared
        return False


def disk_cache_bytes() -> int:
    """Return the size limit of the settings, or the default if the settings cannot be read."""
    try:
        chat = load_settings().chat
    except HeadraceError:  # reported by the chat
        chat = ChatSettings()
    return int(chat.kept_gb * 1e9)


def kv_key(model: Path, network: Network, adapter: Adapter | None = None) -> bytes:
    """Return a digest of everything that K/V depend on: the files of model and adapter, kernels and versions."""
    key = blake2b(digest_size=16)
    folders = [model] if adapter is None else [model, adapter.path]
    for file in [file for folder in folders for file in sorted(folder.glob("*"))]:
        stat = file.stat()
        key.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    status = ops.native.status()
    rounding = ops.native.exact(), network.activations
    numerics = network.kv_format, ops.describe()["kernels"], status.instruction_set, rounding, versions(), _built()
    key.update(f"{[str(folder.resolve()) for folder in folders]} {numerics}".encode())
    return key.digest()


def _built() -> int:
    """Return the time of the newest file of `runtime` and `models`: an updated clone keeps its version.

    Networks compute K/V, those of mlx-lm included, from weights that `models` reads or converts.
    """
    newest = 0
    for top in (*runtime.__path__, *models.__path__):
        for folder, _, names in os.walk(top):
            if not folder.endswith("__pycache__"):
                # Without a `Path` for each file, in a third of the time: a start waits for it.
                for name in names:
                    with suppress(FileNotFoundError):  # an editor's lock, gone or pointing nowhere
                        newest = max(newest, os.stat(f"{folder}/{name}").st_mtime_ns)  # noqa: PTH116
    return newest
