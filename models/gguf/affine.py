"""A converted matrix in MLX's layout."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

GROUP_SIZE = 32


@dataclass(frozen=True)
class Affine:
    """A quantized matrix, or one per expert, in MLX's layout. max_error: against the source's exact values."""

    weight: Array  # (..., rows, columns * bits / 32), uint32
    scales: Array  # (..., rows, columns / group_size), float16 or float32; uint8 exponents in mode mxfp4
    biases: Array | None
    bits: int
    max_error: float
    group_size: int = GROUP_SIZE

    @property
    def mode(self) -> str:
        return "affine" if self.biases is not None else "mxfp4"
