"""The model store: data_dir()/models, one directory per model, complete or absent.

    models/smollm2-135m/            config.json, weights, tokenizer, headrace.json
    models/mlx-community--X-4bit/   headrace.json only, naming a snapshot in the hub's own cache
    models/.partial/NAME/           under construction; the holder of NAME's lock may delete it
    models/.locks/NAME.lock         held while NAME is installed or removed, across processes

A model is built in .partial on the same file system, flushed to disk and renamed into place, so a crash leaves the
old state or the new one. Nothing outside the store is written or deleted, and links in it are not followed. Reading
(`get`, `list`) takes no lock.

Guard: tests/models/registry/test_store.py.
"""

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from headrace.models.checkpoint.safetensors import ORIGIN_FILE
from headrace.models.checkpoint.side_file import without_nulls
from headrace.models.registry.checksums import checksums
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.config.files import DISK_FULL, read_regular, sync_file, sync_folder
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import CheckpointError, HeadraceError, UsageError
from headrace.runtime.machine.background import run_in_background
from headrace.runtime.machine.hardware import run_tool

# A model's name in the store: qwen3-4b, org--name%3AQ4_K_M@main.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@%-]{0,199}")
_LARGEST_ORIGIN = 1 << 20  # bytes of a headrace.json
_OLD = ".old."  # begins the name, in .partial, of a model that is being replaced; no model's name starts with a dot
INCOMPLETE = "no complete model, or one that was deleted from the hub's cache"
"""A name of the store without a model, as for other files that are put there."""

Build = Callable[[Path], Mapping[str, object]]
"""Writes a model into an empty directory, and returns facts for headrace.json, besides those it wrote there itself.

Among them may be "files", the checksums; without them they are computed.
"""


class CachedFiles(Struct, frozen=True):
    """A model's files in the hub's cache. file: its GGUF in the repository; None for a whole revision."""

    repo: str
    commit: str
    file: str | None = None


class StoredModel(Struct, frozen=True):
    """An entry of the store, its files present."""

    name: str
    entry: Path  # its directory in the store
    path: Path  # directory of the weights: `entry`, or a snapshot in the hub cache
    origin: dict[str, Any]  # headrace.json

    @property
    def cached_files(self) -> CachedFiles | None:
        """Its files in the hub's cache; None for a model that was not installed from the hub."""
        repo = self.origin.get("repo")
        commit = self.origin.get("commit")
        if not repo or not commit:
            return None
        return CachedFiles(str(repo), str(commit), self.origin.get("file"))


class Store:
    """The store below `root` (default: in the user's data folder)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else data_dir() / "models"

    def get(self, name: str) -> StoredModel | None:
        """Return the model called `name`, or None if it is not installed or its hub snapshot was deleted."""
        entry = self.root / _checked(name)
        try:
            if not stat.S_ISDIR(entry.lstat().st_mode):  # links are not followed
                return None
            origin = json.loads(read_regular(entry / ORIGIN_FILE, _LARGEST_ORIGIN))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise _broken(name, entry) from error
        if not isinstance(origin, dict):
            raise _broken(name, entry)
        path = Path(str(origin.get("snapshot", entry)))
        try:
            present = (path / "config.json").exists()
        except OSError as error:  # a path that no file can have
            raise _broken(name, entry) from error
        return StoredModel(name, entry, path, origin) if present else None

    def has(self, name: str) -> bool:
        """Return whether there is an entry of that name, broken or not."""
        return os.path.lexists(self.root / _checked(name))

    def names(self) -> Sequence[str]:
        """Return the names of all entries, broken ones too, sorted. Raises HeadraceError for an unreadable folder."""
        try:
            return sorted(entry.name for entry in self.root.iterdir() if _NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise HeadraceError(
                f"the models in {self.root} cannot be read: {error.strerror or error}",
                "make it a folder of yours, or set HEADRACE_HOME",
            ) from error

    def list(self) -> list[StoredModel]:
        """Return all models, by name; no broken ones."""
        return [model for name in self.names() if (model := self._get_or_none(name)) is not None]

    def _get_or_none(self, name: str) -> StoredModel | None:
        """Return `get`, None for a broken entry too."""
        try:
            return self.get(name)
        except CheckpointError:
            return None

    def install(
        self,
        name: str,
        build: Build,
        *,
        replace: bool = False,
        progress: Progress = silent,
    ) -> StoredModel:
        """Install `name` as `build` makes it, and return the stored model.

        If another process is installing the model, wait and use its result unless that is broken or `replace` is set.
        Raises what `build` raises, and HeadraceError if the disk is full or read-only.
        """
        with self._locked(_checked(name), progress):
            if not replace and (present := self._get_or_none(name)) is not None:
                return present
            self._sweep()
            staging = self.root / ".partial" / name
            try:
                new = not staging.parent.exists()
                staging.mkdir(parents=True)
                if new and sys.platform == "darwin":
                    run_tool("/usr/bin/tmutil", "addexclusion", str(self.root))  # models need no backup
                _build(staging, build, progress)
                self._place(staging, name)
            except OSError as error:
                raise _explain(error, self.root) from error
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        installed = self.get(name)
        if installed is None:
            raise CheckpointError(f"installing {name} produced no config.json")
        return installed

    def remove(self, name: str) -> int:
        """Delete the model's directory in the store and return the bytes freed, 0 if it was absent."""
        entry = self.root / _checked(name)
        if not self.has(name):
            return 0
        with self._locked(name, silent, wait=False):
            freed = directory_bytes(entry)
            try:
                if entry.is_symlink() or not entry.is_dir():
                    entry.unlink()
                    return freed
                # Rename first, so that an interrupted removal leaves no incomplete model.
                trash = self.root / ".partial" / name
                shutil.rmtree(trash, ignore_errors=True)
                trash.parent.mkdir(exist_ok=True)
                entry.rename(trash)
                shutil.rmtree(trash)
            except FileNotFoundError:
                return 0
            except OSError as error:
                raise _explain(error, self.root) from error
            return freed

    def _place(self, staging: Path, name: str) -> None:
        """Rename `staging` to its final name and delete the model that was there."""
        final = self.root / name
        old = self.root / ".partial" / f"{_OLD}{name}"
        if final.exists() or final.is_symlink():
            final.rename(old)
        staging.rename(final)
        sync_folder(self.root)
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)

    def _sweep(self) -> None:
        """Delete everything in .partial whose lock is free, as crashed processes leave it."""
        partial = self.root / ".partial"
        if not partial.is_dir():
            return
        for leftover in list(partial.iterdir()):
            name = leftover.name.removeprefix(_OLD)
            try:
                with self._locked(name, silent, wait=False):
                    shutil.rmtree(leftover, ignore_errors=True)
            except HeadraceError:
                continue  # another process is working there

    @contextmanager
    def _locked(self, name: str, progress: Progress, *, wait: bool = True) -> Iterator[None]:
        """Hold a name's lock during the block.

        wait: for another process that holds it, of which `progress` is told. Otherwise HeadraceError is raised.
        """
        import filelock  # late: 20 ms

        # A singleton counts nested acquisitions: the sweep in an install takes the lock of the install again.
        path = self.root / ".locks" / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path, is_singleton=True)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                if not wait:
                    raise HeadraceError(f"{name} is being installed by another headrace process") from None
                progress(f"waiting for another headrace process that installs {name}", 0, None)
                lock.acquire()
        except OSError as error:
            raise _explain(error, self.root) from error
        try:
            yield
        finally:
            lock.release()


def write_model(output: Path, build: Build, progress: Progress) -> Mapping[str, Any]:
    """Write a model to a new directory outside of the store, complete or not at all; return the facts of `build`.

    Raises what `build` raises, and HeadraceError if it cannot be written.
    """
    try:
        with TemporaryDirectory(prefix=f".{output.name}-", dir=output.absolute().parent) as scratch:
            staging = Path(scratch) / "model"
            staging.mkdir()
            facts = _build(staging, build, progress)
            staging.rename(output)
            return facts
    except OSError as error:
        raise HeadraceError(f"{output} cannot be written: {error.strerror or error}") from error


def _build(staging: Path, build: Build, progress: Progress) -> Mapping[str, object]:
    """Build a model in an empty directory, with its headrace.json, and flush it; return the facts of `build`."""
    facts = build(staging)
    with run_in_background(lambda: _flush(staging)) as flushed:  # overlaps hashing
        files = facts["files"] if "files" in facts else checksums(staging, progress=progress)
        progress("saving", 0, None)
        flushed()
    _write_origin(staging, {**facts, "files": files})
    _flush(staging)
    return facts


def _checked(name: str) -> str:
    """Return a name that cannot leave the store's folder. Raises UsageError for others."""
    if _NAME.fullmatch(name) is None or ".." in name:
        raise UsageError(f"not a model name: {name!a}")
    return name


def directory_bytes(path: Path) -> int:
    """Return the bytes of the regular files below `path`, links not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            status = (Path(folder) / name).lstat()
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


def _write_origin(directory: Path, facts: Mapping[str, object]) -> None:
    """Write a headrace.json: the facts that are there already, these, and the time."""
    file = directory / ORIGIN_FILE
    written = json.loads(file.read_bytes()) if file.exists() else {}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = json.dumps({**written, **without_nulls(facts), "installed": stamp}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _flush(directory: Path) -> None:
    """Flush all files and folders below a folder to disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with (Path(folder) / name).open("rb") as file:
                sync_file(file.fileno())
        sync_folder(Path(folder))


def _broken(name: str, entry: Path) -> CheckpointError:
    return CheckpointError(
        f"the store's entry for {name} is broken ({entry / ORIGIN_FILE})",
        f"pulling it again replaces it; `headrace models rm {name}` removes it",
    )


def _explain(error: OSError, root: Path) -> HeadraceError:
    """Return the error to raise for one of the store's file system."""
    where = error.filename or root
    if error.errno in DISK_FULL:
        free = shutil.disk_usage(root).free / 1e9 if root.exists() else 0.0
        message = f"no space left for the model store {root} ({free:.1f} GB free)"
    else:
        message = f"the model store cannot be written at {where}: {error.strerror or error}"
    return HeadraceError(message, "HEADRACE_HOME=DIR puts the store somewhere else")
