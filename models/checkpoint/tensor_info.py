"""Tensor entries of safetensors headers, and the element types MLX reads.

Guard: tests/models/checkpoint/test_safetensors.py.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

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
