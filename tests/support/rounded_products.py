"""Products of rows with quantized weights in a given rounding, for tests of the native kernels."""

import mlx.core as mx

from headrace.runtime.ops import Weight, native
from headrace.runtime.ops.native_plans import PreparedWeight, kernels


def quantized(rows: int, columns: int, mode: str = "affine", bits: int = 4, group: int = 32) -> Weight:
    """Return a random weight (rows, columns)."""
    data, scales, *biases = mx.quantize(mx.random.normal((rows, columns)), group_size=group, bits=bits, mode=mode)
    return Weight(data, scales, biases[0] if biases else None, bits, group, None, mode)


def product(x: mx.array, weight: Weight, rounding: int) -> mx.array:
    """Return x @ weight.T with activations rounded to so many bits; 32: as two bfloat16 numbers."""
    held = native.prepare(weight, mx.float32)
    assert isinstance(held, PreparedWeight)
    assert held.matrix is not None
    return kernels.linear(x, held.matrix, rounding=rounding)


def check_that_non_finite_values_show(rounding: int) -> None:
    """Check that NaN and infinity make their row, and no other, non-finite."""
    weight = quantized(40, 256)
    for value in (float("nan"), float("inf")):
        x = mx.random.normal((5, 256))
        x[4, 100] = value
        out = product(x, weight, rounding)
        assert not mx.isfinite(out[4]).any().item()
        assert mx.isfinite(out[:4]).all().item()
