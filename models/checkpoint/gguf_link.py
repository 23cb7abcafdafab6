"""Store entry of a GGUF file that is read where it lies: links to its parts, and a list of the tensors they become.

gguf.json       {"tensors": {name: {"dtype": "U32", "shape": [576, 72]}}}, as they are after conversion
NAME.gguf       a link to the file, or to each part of a split model
headrace.json   "gguf": {"NAME.gguf": {"bytes": size, "mtime_ns": time}}, the files that the list was made of

`models.registry.import_gguf` writes such an entry, and `open_checkpoint` reads it.

Guard: tests/models/gguf/test_link.py.
"""

import stat
from math import prod
from pathlib import Path

from headrace.models.checkpoint.shard_header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_RANK,
    TensorInfo,
    are_counts,
    read_strict_object,
)
from headrace.models.checkpoint.side_file import quote
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import CheckpointError

LINK_FILE = "gguf.json"


def file_facts(file: Path) -> dict[str, int]:
    """Return size and modification time, by which a file is known again. Raises OSError."""
    facts = file.stat()
    return {"bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def read_link(root: Path, origin: dict[str, object] | None) -> tuple[list[Path], dict[str, TensorInfo]]:
    """Return the GGUF files that the directory `root` links to, and their tensors as converted.

    origin: headrace.json. Raises CheckpointError for a file that has changed or gone away since it was installed.
    """
    files = (origin or {}).get("gguf")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"headrace.json does not name the files of {LINK_FILE}")
    paths = [_unchanged(root, name, facts) for name, facts in files.items()]
    listed = read_strict_object(root, LINK_FILE, MAX_HEADER_BYTES).get("tensors")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{LINK_FILE}: tensors is not an object")
    return paths, {name: _tensor(name, entry, paths[0]) for name, entry in listed.items()}


def _unchanged(root: Path, name: str, facts: object) -> Path:
    """Return the link, if its file is as it was installed. Raises CheckpointError."""
    if "/" in name or name in {"", ".", ".."} or "\0" in name:
        raise CheckpointError(f"headrace.json: {quote(name)} leaves the model directory")
    link = root / name
    shown = link
    if link.is_symlink():
        shown = link.readlink()
    hint = "pass its path where it is now; `headrace rm NAME` removes the old entry"
    try:
        regular = stat.S_ISREG(link.stat().st_mode)
        current = file_facts(link)
    except OSError as error:
        raise CheckpointError(f"{shown} was moved or deleted since it was installed", hint) from error
    if not regular or current != facts:
        raise CheckpointError(f"{shown} has changed since it was installed", hint)
    return link


def _tensor(name: str, entry: object, file: Path) -> TensorInfo:
    """Return one listed tensor. file: the first of the GGUF, which stands for all."""
    stated = as_mapping(entry)
    dtype = str(stated.get("dtype"))
    shape = stated.get("shape")
    width = DTYPE_BYTES.get(dtype)
    if width is None or not isinstance(shape, list) or len(shape) > MAX_RANK or not are_counts(shape):
        raise CheckpointError(f"{LINK_FILE}: tensor {quote(name)} is not described by a type and a shape")
    return TensorInfo(dtype, tuple(shape), file, prod(shape) * width)
