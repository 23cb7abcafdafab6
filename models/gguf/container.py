"""Memory-mapped GGUF files: checked metadata values and raw tensor bytes.

A split model has its metadata in the first file of a set, and tensors in all of them.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.models.checkpoint.split_files import parts_of
from headrace.models.gguf.header import Value, read_header
from headrace.runtime.errors import CheckpointError


@dataclass(frozen=True)
class RawTensor:
    """One stored tensor. data: mapped bytes (rows, bytes per row) in uint8; a vector is one row."""

    name: str
    type: str
    shape: tuple[int, ...]  # in elements, slowest dimension first
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Container:
    """Metadata by key and tensors by name, in file order. paths: several for a split model."""

    paths: list[Path]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, RawTensor]


def open_container(path: Path) -> Container:
    """Check and map `path` and the other files of its set.

    Raises CheckpointError for a broken or missing file, UnsupportedModelError for an unsupported one.
    """
    paths = parts_of(path)
    missing = [each.name for each in paths if not each.exists()]
    if missing and path.exists():
        raise CheckpointError(
            f"{path.name} is one of {len(paths)} parts, and {missing[0]} is missing; put all of them into one folder"
        )
    metadata, tensors = _read(paths[0])
    _check_part(paths[0], metadata, 0, len(paths))
    for number, part in enumerate(paths[1:], 1):
        own, more = _read(part)
        _check_part(part, own, number, len(paths))
        if both := tensors.keys() & more.keys():
            raise CheckpointError(f"{part.name}: tensor {min(both)} is in another part, too")
        tensors |= more
    stated = metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(f"{paths[0].name}: its parts have {len(tensors)} tensors, not {stated!r:.20}")
    return Container(paths, metadata, tensors)


def _check_part(path: Path, metadata: Mapping[str, Value], number: int, count: int) -> None:
    """Fail unless the file says that it is part `number` of `count`."""
    stated = (metadata.get("split.no", 0), metadata.get("split.count", 1) or 1)
    if stated[1] != 1 and count == 1:
        raise CheckpointError(
            f"{path.name}: one part of a split GGUF model; name the parts NAME-00001-of-0000N.gguf, in one folder"
        )
    if stated != (number, count):
        raise CheckpointError(f"{path.name}: it is not part {number + 1} of {count}")


def _read(path: Path) -> tuple[dict[str, Value], dict[str, RawTensor]]:
    """Return metadata and tensors of one file."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # cannot be mapped
                raise CheckpointError(f"{path.name}: too short to be a GGUF file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    header = read_header(path.name, mapped)
    content = np.frombuffer(mapped, np.uint8)  # keeps the mapping alive with its tensors
    tensors = {}
    for entry in header.tensors:
        start = header.data_start + entry.start
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        data = content[start : start + entry.nbytes].reshape(rows, -1)
        tensors[entry.name] = RawTensor(entry.name, entry.type, entry.shape, data)
    return header.metadata, tensors
