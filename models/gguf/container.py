"""Open a GGUF file as metadata values and raw tensor bytes, only after `scan` has found its header sound."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from headrace.models.gguf.scan import check_header
from headrace.runtime.errors import CheckpointError

# A metadata value as it stands in the file: number, boolean, text, or a flat list of one of them.
Value = int | float | bool | str | list[Any]


@dataclass(frozen=True)
class RawTensor:
    """One stored tensor: `data` is (rows, bytes per row) uint8 (a vector is one row), mapped, not yet read."""

    name: str
    type: str
    shape: tuple[int, ...]  # slowest dimension first, in elements
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Container:
    """What a GGUF file holds: metadata by key, tensors by name, in file order."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, RawTensor]


def open_container(path: Path) -> Container:
    """Check and map `path`. Raises `CheckpointError` for a broken file, `UnsupportedModelError` for a foreign one."""
    check_header(path)
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (ValueError, KeyError, IndexError) as error:
        # A text that is not UTF-8, or a file that changed since the scan.
        raise CheckpointError(f"{path.name}: unreadable GGUF metadata ({error})") from error
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(dim) for dim in reversed(tensor.shape.tolist()))
        rows = shape[0] if len(shape) > 1 else 1
        data = tensor.data.reshape(rows, -1).view(np.uint8)
        tensors[tensor.name] = RawTensor(tensor.name, tensor.tensor_type.name, shape, data)
    return Container(path, metadata, tensors)
