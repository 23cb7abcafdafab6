"""The Hadamard transform of packed keys and values, in NumPy, as the definition that others are compared with."""

import math

import numpy as np
from numpy.typing import NDArray


def hadamard(dim: int) -> NDArray[np.float64]:
    """Return the matrix of the transform of a head: parts of the largest power of two in `dim`."""
    part = dim & -dim
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(part)] for i in range(part)]
    return np.kron(np.eye(dim // part), np.array(signs) / math.sqrt(part))
