"""What the CPU kernels reach, against what this machine's memory and arithmetic allow. Repeatable:

    python -m tests.bench.kernels [--layers 30] [--only step,batch,prefill,depth,nodes]

Random weights of the default model's shape (SmolLM2-135M, 4-bit group 32, 8-bit tied embedding); medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from runtime.ops import native, select
from runtime.ops.weights import AttentionSpec, Rope, Weight


@dataclass(frozen=True)
class Shape:
    """A llama-shaped model. `group` is the quantization group of the layers."""

    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1536
    vocab: int = 49152
    bits: int = 4
    group: int = 32
    head_bits: int = 8
    head_group: int = 32


SHAPES = {
    "135m": Shape(),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 4, 64, 4, 64),
    "3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, 4, 64, 4, 64),
}


class Model:
    """Layers of random weights on the ops seam: the same five nodes a layer that the networks use."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.ops = shape, select()
        s = shape
        self.spec = AttentionSpec(
            s.heads, s.kv_heads, s.head_dim, s.head_dim**-0.5, Rope(s.head_dim, mx.ones(s.head_dim // 2))
        )
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.layers = [
            (
                self._weight(qkv, s.width),
                self._weight(s.width, s.heads * s.head_dim),
                self._weight(2 * s.hidden, s.width),
                self._weight(s.width, s.hidden),
            )
            for _ in range(s.layers)
        ]
        self.head = self._weight(s.vocab, s.width, s.head_bits, s.head_group)
        self.norm = mx.ones(s.width)
        mx.eval(self.norm)
        self.bytes = sum(w.nbytes for w in [*(w for layer in self.layers for w in layer), self.head])

    def _weight(self, rows: int, columns: int, bits: int = 0, group: int = 0) -> Weight:
        bits, group = bits or self.shape.bits, group or self.shape.group
        packed = mx.random.randint(0, 2**31 - 1, (rows, columns * bits // 32)).astype(mx.uint32)
        scales = mx.full((rows, columns // group), 0.01 / 2**bits, mx.float16)
        weight = Weight(packed, scales, -scales * 2 ** (bits - 1), bits, group)
        mx.eval(*weight.arrays)
        return self.ops.prepare(weight, mx.float32)

    def cache(self, capacity: int, batch: int = 1) -> list[tuple[mx.array, mx.array]]:
        s = self.shape
        shape = (batch, s.kv_heads, capacity, s.head_dim)
        dtype = self.ops.kv_dtype(mx.float32)
        cache = [(mx.zeros(shape, dtype), mx.zeros(shape, dtype)) for _ in range(s.layers)]
        mx.eval(cache)
        return cache

    def forward(self, x: mx.array, cache: list[tuple[mx.array, mx.array]], offset: int) -> mx.array:
        """(B, T, E) -> logits of the last position (B, 1, V)."""
        ops = self.ops
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            keys, values = cache[i]
            cache[i] = (keys, values)
            h = ops.norm_linear(x, self.norm, 1e-5, qkv)
            del keys, values
            attended, *kv = ops.attend(h, *cache.pop(i), offset, self.spec)
            cache.insert(i, (kv[0], kv[1]))
            del kv
            x = ops.linear_add(attended, out, x)
            x = ops.linear_add(ops.norm_glu(x, self.norm, 1e-5, gate_up, "silu"), down, x)
        return ops.norm_linear(x[:, -1:], self.norm, 1e-5, self.head)


def median_seconds(run: Callable[[], object], seconds: float = 2.0) -> float:
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
