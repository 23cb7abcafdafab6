"""Values of arrays on the host, with the types that MLX's stubs leave open. Reading waits for the device."""

from typing import cast

import mlx.core as mx


def read_ints(vector: mx.array) -> list[int]:
    """Return the integers of a vector."""
    return cast(list[int], vector.tolist())


def read_floats(vector: mx.array) -> list[float]:
    """Return the numbers of a vector."""
    return cast(list[float], vector.tolist())
