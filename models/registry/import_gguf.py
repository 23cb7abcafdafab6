"""Taking a GGUF file into the store: converted once to an MLX-format directory, found again by content.

A file is known by the sha256 of its bytes. So that the second start neither hashes nor converts, the store
remembers the hash of each path together with the file's size and modification time (`.gguf.json`).
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.config.cache_file import read_cache, write_cache
from headrace.runtime.errors import HeadraceError, ModelNotFoundError

_CHUNK = 4 << 20
_SEEN = ".gguf.json"


def import_gguf(file: Path, store: Store, *, progress: Progress = silent) -> StoredModel:
    """The store's conversion of `file`, made now if it is not there yet.

    Raises CheckpointError for files that are no sound GGUF and ModelNotFoundError for one that cannot be read.
    """
    seen = _load(store)
    key = str(file)
    try:
        status = file.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        if key in seen and seen[key].get("stamp") == stamp and (known := _stored(seen[key], store)) is not None:
            return known
        _check_header(file)
        sha256 = _hash(file, status.st_size, progress)
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {file}: {error.strerror}") from error

    def build(directory: Path) -> dict[str, Any]:
        convert(file, directory, progress, sha256)
        return {"id": file.name, "source": f"local file {file}", "sha256": sha256}

    # The same content under another name, a catalog model's included, is already there.
    model = next((model for model in store.list() if model.origin.get("sha256") == sha256), None)
    if model is None:
        model = store.install(stored_name(file, sha256), build, progress=progress)
    _save(store, {**_load(store), key: {"stamp": stamp, "name": model.name}})
    return model


def convert(file: Path, directory: Path, progress: Progress, sha256: str | None = None) -> None:
    """Write the MLX-format conversion of `file` into `directory`; `sha256` if the caller knows it."""
    from headrace.models.gguf import (
        convert_gguf,  # numpy and gguf: seconds that a start without conversion does not need
    )

    convert_gguf(
        file,
        directory,
        progress=lambda done, total: progress("converting", done, total),
        sha256=sha256,
        groups_of_16=_reads_groups_of_16,
    )


def _reads_groups_of_16(config: dict[str, Any]) -> bool:
    """Whether a model of that config runs on this machine's native kernels; mlx-lm's classes and stock MLX do not."""
    from headrace.models.network.config import decoder_config
    from headrace.runtime import ops

    return decoder_config(config) is not None and ops.select() is ops.native


def stored_name(file: Path, sha256: str) -> str:
    """The name of the conversion in the store: readable, and different for different contents."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip(".-_") or "model"
    return f"{re.sub(r'[.]{2,}', '.', stem)[:80]}-{sha256[:12]}"


def _check_header(file: Path) -> None:
    """Before gigabytes of something that is refused anyway are hashed."""
    from headrace.models.gguf.container import open_container  # numpy, which a start without conversion does not need

    open_container(file)


def _hash(file: Path, size: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            progress("hashing", stream.tell(), size)
    return digest.hexdigest()


def _load(store: Store) -> dict[str, dict[str, Any]]:
    return {path: row for path, row in read_cache(store.root / _SEEN).items() if isinstance(row, dict)}


def _save(store: Store, seen: dict[str, dict[str, Any]]) -> None:
    """Remember for the next start; entries of deleted files and models are dropped on the way."""
    kept = {path: row for path, row in seen.items() if Path(path).exists() and _stored(row, store) is not None}
    write_cache(store.root / _SEEN, kept)


def _stored(row: dict[str, Any], store: Store) -> StoredModel | None:
    """The model a remembered row points at, or None for a row that points at nothing sound."""
    try:
        return store.get(str(row.get("name")))
    except HeadraceError:
        return None
