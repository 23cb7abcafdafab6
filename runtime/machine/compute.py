"""Compute speed measurement: the compute ceiling of a roofline, with the operations in use.

A matrix of 4-bit weights in groups of 64 is multiplied with many rows of activations through `runtime.ops`, as in a
prefill. The best measurement ever made here with these kernels counts, since other load only slows one down. Files that
cannot be read or written are ignored.

`bench`, `predict` and an idle engine process measure it; rooflines and step limits read the stored value. Memory has
its own measurement (`bandwidth.py`).

Guard: tests/runtime/machine/test_compute.py.
"""

import math
import time
from pathlib import Path

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.machine.bandwidth import Progress
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.peaks import machine_key
from headrace.runtime.ops import Weight

ROWS = 512  # of activations, as in a chunk of a prompt: weights are read once for all
FEW_ROWS = 4  # the same where ROWS would take too long
_CPU_SIZE = 2048  # rows and columns of the weights
_GPU_SIZE = 4096  # a GPU needs more work to be busy
_SECONDS = 0.25  # of measurement
_SLOW_S = 0.06  # for FEW_ROWS; more rows would take seconds
# The usual quantization of MLX's conversions.
_GROUP = 64
_BITS = 4


def cached_compute() -> float | None:
    """Return the best FLOP/s measured on this machine with the active kernels, or None."""
    stored = read_cache(_cache_file()).get(_key())
    if not isinstance(stored, float) or not math.isfinite(stored) or stored <= 0:
        return None
    return stored


def measure_compute(progress: Progress | None = None) -> float:
    """Measure FLOP/s (a multiply-add counts as two) and store the best. Takes about a quarter of a second."""
    measured = _measure(progress or (lambda _: None))
    if measured > (cached_compute() or 0.0):
        write_cache(_cache_file(), {**read_cache(_cache_file()), _key(): measured})
    return measured


def _measure(progress: Progress) -> float:
    """Return the FLOP/s of the fastest product."""
    size = _CPU_SIZE
    dtype = mx.float32
    if mx.default_device().type == mx.DeviceType.gpu:
        size = _GPU_SIZE
        dtype = mx.float16
    active = ops.select()
    plain = mx.random.normal((size, size)).astype(dtype)
    weight = active.prepare(Weight(*mx.quantize(plain, _GROUP, _BITS), bits=_BITS, group_size=_GROUP), dtype)
    _seconds(active, weight, FEW_ROWS, dtype)  # compiles kernels, lays out weights
    slow = min(_seconds(active, weight, FEW_ROWS, dtype) for _ in range(3)) > _SLOW_S  # stock MLX on some CPUs
    rows = FEW_ROWS if slow else ROWS
    best = float("inf")
    began = time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < _SECONDS:
        progress(min(1.0, (time.perf_counter() - began) / _SECONDS))
        best = min(best, _seconds(active, weight, rows, dtype))
    return 2 * rows * size * size / best


def _seconds(active: ops.Ops, weight: Weight, rows: int, dtype: mx.Dtype) -> float:
    """Return the time of one product of so many rows with the weight."""
    x = mx.random.normal((1, rows, weight.columns)).astype(dtype)  # (B, T, K)
    mx.eval(x)  # outside of the clock
    began = time.perf_counter()
    mx.eval(active.linear(x, weight))
    return time.perf_counter() - began


def _key() -> str:
    return f"{machine_key(machine())} / {ops.describe().get('kernels')}"


def _cache_file() -> Path:
    return cache_dir() / "compute.json"
