"""Foreign matrices of a checkpoint and the tensors they become.

`formats` makes them of headers; `checkpoint.arrays` converts the weights as they state. A checkpoint's `tensors` and
`quantization` describe the result, so that nothing after it knows the foreign format. Layouts:

    scaled    E4M3 or int8, one scale for each block
    gptq      integers of 2, 4 or 8 bits, transposed, in words along K
    awq       integers of 4 bits, transposed, in words along N
    packed    integers of 2, 4 or 8 bits, in words along K
    nf4       codes of 4 bits into a table of values, one scale for each block
    ternary   -1, 0 or 1 in 2 bits, a quarter of the rows in a byte, times one scale; or divided by it: "ternary_over"

A new layout is a row here, a name in `Layout`, and a case of `_converted` in `checkpoint.arrays`. The headers of
`Foreign.tensors` have to match the arrays that this function returns, as a test compares.

Guards: tests/models/checkpoint/test_foreign.py.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Literal

from msgspec import Struct, field

from headrace.models.checkpoint.shard_header import TensorInfo

Layout = Literal["scaled", "gptq", "awq", "packed", "nf4", "ternary", "ternary_over"]
# Values that affine groups do not represent exactly are quantized to these bits, in the largest group that fits a row.
REQUANTIZED_BITS = 8
REQUANTIZED_GROUPS = (64, 32)


class ForeignMatrix(Struct, frozen=True):
    """A stored matrix and its target: affine groups, or float32 if `bits` is None.

    layout: see the table above.
    shape: (..., N, K), as the network has it.
    parts: stored tensors by role: data, scales, and where there are such: zeros, order; for "nf4" table, nested_scales,
        nested_table.
    stored_bits: of an element.
    stored_group: elements that share a scale; 0 for "scaled", which has `blocks`.
    blocks: elements of each axis that share a scale, for "scaled"; for "nf4" one number: scales that share a scale.
    bits, group_size: of the target.
    exact: the target has the same values.
    offset: added to the scales of "nf4" with double quantization.
    """

    layout: Layout
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    stored_bits: int
    stored_group: int
    blocks: tuple[int, ...] = ()
    bits: int | None = None
    group_size: int = 0
    exact: bool = False
    offset: float = 0.0


class Foreign(Struct, frozen=True):
    """A checkpoint's foreign quantization."""

    method: str  # in words, for people
    matrices: Mapping[str, ForeignMatrix]  # by the name of the resulting tensor
    dropped: frozenset[str] = field(default_factory=frozenset)  # stored tensors that are not needed
    zeros_less_one: bool = False  # GPTQ's first format stores zero points minus one

    @property
    def exact(self) -> bool:
        """Return whether every weight keeps its value."""
        return all(matrix.exact for matrix in self.matrices.values())

    def describe(self) -> str:
        """Return one line on the stored format and the conversion."""
        if self.exact:
            return f"stored as {self.method}, which MLX's affine groups hold exactly"
        return f"stored as {self.method}, which is dequantized exactly and requantized to 8 bits"

    def quantization(self) -> dict[str, object]:
        """Return MLX's `quantization` section for the converted matrices."""
        kinds = {name.removesuffix(".weight"): m for name, m in self.matrices.items() if m.bits is not None}
        counts = Counter((m.bits, m.group_size) for m in kinds.values())
        bits, group = max(counts, key=counts.__getitem__, default=(REQUANTIZED_BITS, REQUANTIZED_GROUPS[0]))
        section: dict[str, object] = {"bits": bits, "group_size": group, "mode": "affine"}
        for module, m in kinds.items():
            if (m.bits, m.group_size) != (bits, group):
                section[module] = {"bits": m.bits, "group_size": m.group_size}
        return section

    def tensors(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the headers after conversion."""
        used = self.dropped | {part for m in self.matrices.values() for part in m.parts.values()}
        seen = {name: info for name, info in stored.items() if name not in used}
        for name, matrix in self.matrices.items():
            shard = stored[matrix.parts["data"]].shard
            if matrix.bits is None:
                seen[name] = TensorInfo("F32", matrix.shape, shard, 4 * prod(matrix.shape))
                continue
            rows, columns = matrix.shape
            module = name.removesuffix(".weight")
            groups = columns // matrix.group_size
            words = columns * matrix.bits // 32  # MLX packs a row into 32-bit words
            seen[name] = TensorInfo("U32", (rows, words), shard, 4 * rows * words)
            for part in ("scales", "biases"):
                seen[f"{module}.{part}"] = TensorInfo("F32", (rows, groups), shard, 4 * rows * groups)
        return seen


def requantized(shape: tuple[int, ...]) -> tuple[int | None, int]:
    """Return (bits, group size) after dequantizing; (None, 0), for float32, if no group fits a row or it is a stack."""
    group = next((size for size in REQUANTIZED_GROUPS if shape[-1] % size == 0), 0)
    if not group or len(shape) != 2:
        return None, 0
    return REQUANTIZED_BITS, group
