"""How fast this machine multiplies: the compute ceiling of a roofline, measured with the operations that run here.

A matrix of 4-bit weights in groups of 64 meets many rows of activations through `runtime.ops`, as in a prefill that
does nothing else. The best of a few rounds counts, since whatever else the machine does only makes one slower.
"""

import time

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.ops import Weight

ROWS, FEW_ROWS = 512, 4
_SECONDS = 0.25
_SLOW_S = 0.06  # for the few rows: many would take seconds
_GROUP, _BITS = 64, 4


def compute_gflop_s() -> float:
    """GFLOP/s (1e9), counting a multiplication and an addition as two. Takes about a quarter of a second."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    size = 4096 if on_gpu else 2048
    active, dtype = ops.select(), mx.float16 if on_gpu else mx.float32
    plain = mx.random.normal((size, size)).astype(dtype)
    weight = active.prepare(Weight(*mx.quantize(plain, _GROUP, _BITS), bits=_BITS, group_size=_GROUP), dtype)
    _seconds(active, weight, FEW_ROWS, dtype)  # kernels compiled, weights laid out
    slow = min(_seconds(active, weight, FEW_ROWS, dtype) for _ in range(3)) > _SLOW_S  # stock MLX on some CPUs
    rows, best, began = FEW_ROWS if slow else ROWS, float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < _SECONDS:
        best = min(best, _seconds(active, weight, rows, dtype))
    return 2 * rows * size * size / best / 1e9


def _seconds(active: ops.Ops, weight: Weight, rows: int, dtype: mx.Dtype) -> float:
    x = mx.random.normal((1, rows, weight.columns)).astype(dtype)  # (B, T, K)
    mx.eval(x)
    began = time.perf_counter()
    mx.eval(active.linear(x, weight))
    return time.perf_counter() - began
