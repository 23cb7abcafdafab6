"""Memory-mapped GGUF files: checked metadata values and raw tensor bytes."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    """Metadata by key and tensors by name, in file order."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, RawTensor]


def open_container(path: Path) -> Container:
    """Check and map `path`. Raises CheckpointError for a broken file, UnsupportedModelError for an unsupported one."""
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
    return Container(path, header.metadata, tensors)
