"""One tensor as a safetensors header describes it, and the element types MLX reads."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Bytes per element of the types MLX reads from safetensors. F8 types arrive as their bits, in uint8.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, shape and size, and the shard it is in."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    shard: Path
    nbytes: int


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The floating dtype of a checkpoint: the half precision most of its tensors have, F32 where none has either."""
    halves = Counter(info.dtype for info in tensors.values() if info.dtype in ("F16", "BF16")).most_common(1)
    if halves:
        return halves[0][0]
    return "F32" if any(info.dtype == "F32" for info in tensors.values()) else "F16"
