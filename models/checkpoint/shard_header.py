"""Strict parsing of untrusted files in a model directory: JSON objects and safetensors headers, with their tensors.

File format: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes, back to back
(https://github.com/huggingface/safetensors#format). Loading code relies on these checks.

Guards: tests/faults/test_checkpoints.py and tests/models/checkpoint/test_safetensors.py.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from msgspec import Struct

from headrace.models.checkpoint.side_file import MAX_PARTS, check_inside, check_parts, check_unicode, quote, unique_keys
from headrace.runtime.errors import CheckpointError

# Limits on JSON: above real files, and low enough that parsing hostile ones stays cheap.
MAX_CONFIG_BYTES = 4 << 20
MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors in one shard need about 12 MB
MAX_STATE_BYTES = 1 << 16  # of bitsandbytes' state of a matrix: a few hundred
MAX_RANK = 8  # axes of a tensor; weights have up to five
# Bytes per element. MLX reads F8 types as their bits, in uint8.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32")


class TensorInfo(Struct, frozen=True):
    """One tensor of a shard."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    shard: Path
    nbytes: int
    start: int = 0  # first byte in the file; 0 for a converted tensor


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the checkpoint's float type: its most common half precision, or F32 if it has none."""
    halves = Counter(info.dtype for info in tensors.values() if info.dtype in ("F16", "BF16")).most_common(1)
    if halves:
        return halves[0][0]
    return "F32" if any(info.dtype == "F32" for info in tensors.values()) else "F16"


def read_strict_object(root: Path, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """Return the JSON object in the regular file `name` of `root`, of at most `limit` bytes."""
    with open(_open_inside(root, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{name} is larger than {limit >> 20} MiB")
        return _parse_object(file.read(limit), name)


def read_small_object(info: TensorInfo, name: str) -> dict[str, object]:
    """Return the JSON object in the bytes of the tensor `name`."""
    if info.dtype != "U8" or info.nbytes > MAX_STATE_BYTES:
        raise CheckpointError(f"tensor {name} is {info.dtype} of {info.nbytes} bytes, no short text")
    with open(_open_inside(info.shard.parent, info.shard.name), "rb") as file:
        file.seek(info.start)
        return _parse_object(file.read(info.nbytes), name)


def _parse_object(data: bytes, where: str) -> dict[str, object]:
    """Parse a JSON object with valid Unicode, without repeated keys, NaN or excessive nesting."""
    try:
        check_parts(data, MAX_PARTS)
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_no_constant)
        check_unicode(data, value)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where} has a text that is no Unicode: a lone surrogate") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, repeated keys, NaN, integers of thousands of digits
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def _no_constant(name: str) -> object:
    """Return infinity, the only constant allowed. Raises ValueError for NaN and -Infinity."""
    # None of them is valid JSON. Published configs have Infinity (Mamba's time_step_limit); it cannot become a size or
    # a shape, which are checked integers.
    if name == "Infinity":
        return float("inf")
    raise ValueError(f"{name} is not a number")


def read_header(root: Path, name: str, tensors: dict[str, TensorInfo]) -> None:
    """Add the tensors of one shard to `tensors`."""
    with open(_open_inside(root, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{name} is truncated: {size} bytes are no safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{name} claims a header of {length} bytes, over {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise CheckpointError(f"{name} is truncated: header of {length} bytes, {size - 8} are there")
        header = _parse_object(file.read(length), f"the header of {name}")

    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"{name}: __metadata__ is not a map of strings")
    shard = root / name
    spans: list[tuple[int, int, str]] = []  # begin, end, tensor
    for tensor, entry in header.items():
        if tensor in tensors:
            raise CheckpointError(f"{quote(tensor)} is in {tensors[tensor].shard.name} and again in {name}")
        dtype, shape, begin, end = _tensor_entry(entry, tensor, name)
        start = 8 + length + begin  # in the file; `begin` counts from the end of the header
        tensors[tensor] = TensorInfo(dtype, shape, shard, end - begin, start)
        spans.append((begin, end, tensor))
    _check_spans(spans, size - 8 - length, name)


def _tensor_entry(entry: object, tensor: str, shard: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype, shape, begin, end) of one header entry; offsets count from the end of the header."""
    where = f"{shard}: tensor {quote(tensor)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is not described by an object")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    width = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if width is None:
        raise CheckpointError(f"{where} has the unknown type {quote(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not are_counts(shape):
        raise CheckpointError(f"{where} has the impossible shape {quote(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not are_counts(offsets):
        raise CheckpointError(f"{where} has the impossible offsets {quote(offsets)}")
    begin, end = offsets
    if end - begin != prod(shape) * width:
        raise CheckpointError(
            f"{where} is {dtype} {quote(shape)}, {prod(shape) * width} bytes, but spans {end - begin}"
        )
    return str(dtype), tuple(shape), begin, end


def are_counts(values: Iterable[object]) -> bool:
    """Return whether all are whole numbers from 0 and below 2**48, which no real size reaches."""
    # `type`, not isinstance: True is an int.
    return all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _check_spans(spans: list[tuple[int, int, str]], available: int, shard: str) -> None:
    """Raise CheckpointError unless the tensors cover the data exactly."""
    spans.sort()
    reached = 0  # end of the tensors so far
    for begin, end, tensor in spans:
        if end > available:
            raise CheckpointError(
                f"{shard} is truncated: tensor {quote(tensor)} ends at byte {end}, the data at {available}"
            )
        if begin != reached:
            problem = "overlaps the tensor before it" if begin < reached else "leaves a hole before it"
            raise CheckpointError(f"{shard}: tensor {quote(tensor)} {problem}")
        reached = end
    if reached != available:
        raise CheckpointError(f"{shard} has {available - reached} bytes that belong to no tensor")


def _open_inside(root: Path, name: str) -> int:
    """Open the regular file `name` in `root` and return its descriptor; links out of the directory are refused."""
    path = root / name
    try:
        check_inside(root, path)
        # O_NONBLOCK: opening a FIFO would wait for a writer. It is refused below, and reads of regular files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name} is not a regular file")
    return descriptor
