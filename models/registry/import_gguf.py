"""Import of GGUF files into the store: one conversion to an MLX-format directory per content.

A file is identified by its sha256. The store caches the hash of each path with the file's size and modification time
in `.gguf.json`, so that the next start neither hashes nor converts.
"""

import re
from pathlib import Path
from typing import Any

from headrace.models.registry.checksums import ByteProgress, hash_file
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.config.cache_file import read_cache, write_cache
from headrace.runtime.errors import HeadraceError, ModelNotFoundError

_SEEN = ".gguf.json"


def import_gguf(file: Path, store: Store, *, progress: Progress = silent) -> StoredModel:
    """Return the store's conversion of `file`, converting it first if needed.

    Raises CheckpointError for an invalid GGUF and ModelNotFoundError for an unreadable file.
    """
    seen = _load(store)
    key = str(file)
    try:
        status = file.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        if key in seen and seen[key].get("stamp") == stamp and (known := _stored(seen[key], store)) is not None:
            return known
        _check_header(file)
        sha256 = hash_file(file, ByteProgress(progress, "hashing", status.st_size))
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {file}: {error.strerror}") from error

    def build(directory: Path) -> dict[str, Any]:
        convert(file, directory, progress, sha256)
        return {"id": file.name, "source": f"local file {file}", "sha256": sha256}

    # The same content may be in the store under another name, for example a catalog model's.
    model = next((model for model in store.list() if model.origin.get("sha256") == sha256), None)
    if model is None:
        model = store.install(stored_name(file, sha256), build, progress=progress)
    _save(store, {**_load(store), key: {"stamp": stamp, "name": model.name}})
    return model


def convert(file: Path, directory: Path, progress: Progress, sha256: str | None = None) -> None:
    """Write the MLX-format conversion of `file` into `directory`. sha256: the file's digest, if known."""
    from headrace.models.gguf import (
        convert_gguf,  # late: numpy and gguf take seconds
    )

    convert_gguf(
        file,
        directory,
        progress=lambda done, total: progress("converting", done, total),
        sha256=sha256,
        groups_of_16=_reads_groups_of_16,
    )


def _reads_groups_of_16(config: dict[str, Any]) -> bool:
    """Return whether the native kernels run this config; mlx-lm's classes and stock MLX lack groups of 16."""
    from headrace.models.network.config import decoder_config
    from headrace.runtime import ops

    return decoder_config(config) is not None and ops.select() is ops.native


def stored_name(file: Path, sha256: str) -> str:
    """Return the name of the conversion in the store: the file's stem and part of its digest."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip(".-_") or "model"
    return f"{re.sub(r'[.]{2,}', '.', stem)[:80]}-{sha256[:12]}"


def _check_header(file: Path) -> None:
    """Check the header before gigabytes are hashed."""
    from headrace.models.gguf.container import open_container  # late: numpy

    open_container(file)


def _load(store: Store) -> dict[str, dict[str, Any]]:
    return {path: row for path, row in read_cache(store.root / _SEEN).items() if isinstance(row, dict)}


def _save(store: Store, seen: dict[str, dict[str, Any]]) -> None:
    """Write the cache for the next start, without entries of deleted files and models."""
    kept = {path: row for path, row in seen.items() if Path(path).exists() and _stored(row, store) is not None}
    write_cache(store.root / _SEEN, kept)


def _stored(row: dict[str, Any], store: Store) -> StoredModel | None:
    """Return the model that a cached row names, or None for an invalid row."""
    try:
        return store.get(str(row.get("name")))
    except HeadraceError:
        return None
