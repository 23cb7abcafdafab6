"""Memory-mapped GGUF files: checked metadata values and raw tensor bytes.

A split model has its metadata in the first file of a set, and tensors in all of them. `header` has checked every
number by then; values are read through `metadata.Metadata`, and weights by `convert` and `parts`.

Guards: tests/models/gguf/test_container.py and test_split.py.
"""

import mmap
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headrace.models.checkpoint.split_files import present_parts
from headrace.models.gguf.header import ANEW, MAX_HEADER_BYTES, HeaderCutError, TensorEntry, Value, read_header
from headrace.models.gguf.ollama import as_llama_cpp
from headrace.runtime.errors import CheckpointError


class RawTensor(Struct, frozen=True):
    """One stored tensor."""

    name: str
    type: str  # a key of `header.BLOCKS`
    shape: tuple[int, ...]  # in elements, slowest dimension first
    data: npt.NDArray[np.uint8]  # mapped bytes (rows, bytes per row); a vector is one row


_Content = tuple[dict[str, Value], dict[str, RawTensor]]
"""Metadata and tensors of one file."""

# Bytes of a remote file that the next read of its header asks for: as many as were read, within these bounds.
_LEAST_BYTES = 1 << 20
_MOST_BYTES = 4 << 20
_MOST_VALUES = 1 << 20  # bytes of a tensor whose values are read from a remote file; factors of a rope have a few KiB


class Container(Struct, frozen=True):
    """Metadata by key and tensors by name, in file order. paths: several for a split model."""

    paths: list[Path]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, RawTensor]


class RemoteFile(Protocol):
    """A file that is read in parts."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, start: int, count: int) -> bytes: ...


def open_container(path: Path) -> Container:
    """Check and map `path` and the other files of its set.

    Raises CheckpointError for a broken or missing file, UnsupportedModelError for an unsupported one.
    """
    paths = present_parts(path)
    return _joined(paths, map(_read, paths))


def remote_container(parts: Sequence[RemoteFile], values_of: Callable[[Value | None], Collection[str]]) -> Container:
    """Return the container of files of which only headers are read, and the values of some tensors.

    values_of(architecture): names of these tensors; the data of others are zeros. Raises as `open_container`, and
    errors of reading.
    """
    return _joined([Path(part.name) for part in parts], (_read_remote(part, values_of) for part in parts))


def _joined(paths: list[Path], contents: Iterable[_Content]) -> Container:
    """Return one container of the files of a set."""
    metadata: dict[str, Value] = {}
    tensors: dict[str, RawTensor] = {}
    for number, (part, (part_metadata, part_tensors)) in enumerate(zip(paths, contents, strict=True)):
        _check_part(part, part_metadata, number, len(paths))
        if both := tensors.keys() & part_tensors.keys():
            raise CheckpointError(f"{part.name}: tensor {min(both)} is in another part, too")
        metadata = metadata or part_metadata  # the model's is in the first file, those of others describe the part
        tensors |= part_tensors
    stated = metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(f"{paths[0].name}: its parts have {len(tensors)} tensors, not {stated!r:.20}")
    return Container(paths, *as_llama_cpp(metadata, tensors))


def _check_part(path: Path, metadata: Mapping[str, Value], number: int, count: int) -> None:
    """Fail unless the file says that it is part `number` of `count`."""
    stated_number = metadata.get("split.no", 0)
    stated_count = metadata.get("split.count", 1) or 1
    if stated_count != 1 and count == 1:
        raise CheckpointError(
            f"{path.name}: one part of a split GGUF model; name the parts NAME-00001-of-0000N.gguf, in one folder"
        )
    if (stated_number, stated_count) != (number, count):
        raise CheckpointError(f"{path.name}: it is not part {number + 1} of {count}")


def forget(tensor: RawTensor) -> None:
    """Take the pages of a mapped tensor out of this process's memory. A later access reads them from the file again.

    A tensor of a remote file, whose data are no map, stays as it is.
    """
    whole = tensor.data.base  # an array of the mapped file, see `_read`
    mapped = whole.base.obj if isinstance(whole, np.ndarray) and isinstance(whole.base, memoryview) else None
    if not isinstance(mapped, mmap.mmap) or not isinstance(whole, np.ndarray):
        return
    offset = tensor.data.ctypes.data - whole.ctypes.data
    first = offset - offset % mmap.PAGESIZE  # madvise takes whole pages; the neighbour's part is only read again
    mapped.madvise(mmap.MADV_DONTNEED, first, offset + tensor.data.nbytes - first)


def _read(path: Path) -> _Content:
    """Map a file; return its metadata and tensors. Raises CheckpointError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path.name}: not a regular file", "pass a .gguf file on a disk")
        if status.st_size == 0:  # cannot be mapped
            raise CheckpointError(f"{path.name}: too short to be a GGUF file", ANEW)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    header = read_header(path.name, mapped)
    content = np.frombuffer(mapped, np.uint8)  # keeps the mapping alive with its tensors
    tensors = {}
    for entry in header.tensors:
        start = header.data_start + entry.start
        tensors[entry.name] = _raw(entry, content[start : start + entry.nbytes])
    return header.metadata, tensors


def _read_remote(file: RemoteFile, values_of: Callable[[Value | None], Collection[str]]) -> _Content:
    """Read more and more of a remote file until its header is whole, then some values. See `remote_container`."""
    content = b""
    while True:
        more = min(max(len(content), _LEAST_BYTES), _MOST_BYTES)
        wanted = min(len(content) + more, MAX_HEADER_BYTES, file.size)
        content += file.read(len(content), wanted - len(content))
        try:
            header = read_header(file.name, content, file.size)
            break
        except HeaderCutError:
            if len(content) == wanted == min(MAX_HEADER_BYTES, file.size):  # no more can be read
                raise CheckpointError(f"{file.name}: its header has no end") from None
    tensors = {}
    wanted_values = values_of(header.metadata.get("general.architecture"))
    for entry in header.tensors:
        data = np.broadcast_to(np.uint8(0), entry.nbytes)  # one byte, seen entry.nbytes times: takes no memory
        if entry.name in wanted_values and entry.nbytes <= _MOST_VALUES:
            data = np.frombuffer(file.read(header.data_start + entry.start, entry.nbytes), np.uint8)
        tensors[entry.name] = _raw(entry, data)
    return header.metadata, tensors


def _raw(entry: TensorEntry, data: npt.NDArray[np.uint8]) -> RawTensor:
    """Return a tensor with its bytes in rows; those of a stack of matrices (X, N, K) in X rows."""
    rows = entry.shape[0] if len(entry.shape) > 1 else 1
    return RawTensor(entry.name, entry.type, entry.shape, data.reshape(rows, -1))
