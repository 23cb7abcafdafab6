"""Speed of the CPU kernels against the memory bandwidth: best of many runs, wall time in seconds.

    python -m tests.bench.kernels [--shape 135m|1b|3b] [--threads N] [--seconds S]

Random weights; 135m is the default model's shape (4-bit group 32, 8-bit tied embedding). Use an idle machine.
"""

import argparse
import time
from collections.abc import Callable

import mlx.core as mx

from headrace.runtime.ops import BLOCK, KVKind, KVStore, Pass, Phase, SequenceRows, native, select
from headrace.runtime.ops.layer_weights import LayersNode, LayerWeights
from headrace.runtime.ops.weights import AttentionSpec, Rope, Weight
from tests.bench.shapes import SHAPES, Shape
from tests.bench.widths import print_table

STREAMED_BYTES = 256 << 20  # more than any cache has
Cache = tuple[list[mx.array], list[mx.array]]  # keys and values of every layer


class Model:
    """Layers of random weights on `runtime.ops`, one graph node each."""

    def __init__(self, shape: Shape, seconds: float) -> None:
        self.shape, self.ops, self.budget = shape, select(), seconds
        s = shape
        self.spec = AttentionSpec(
            s.heads, s.kv_heads, s.head_dim, s.head_dim**-0.5, Rope(s.head_dim, mx.ones(s.head_dim // 2))
        )
        self.layers = [
            (
                self._weight(s.qkv_rows, s.width),
                self._weight(s.width, s.heads * s.head_dim),
                self._weight(2 * s.hidden, s.width),
                self._weight(s.width, s.hidden),
            )
            for _ in range(s.layers)
        ]
        self.head = self._weight(s.vocab, s.width, s.head_bits, s.head_group)
        self.norm = mx.ones(s.width)
        mx.eval(self.norm)
        self.node = self._node()
        self.bytes = sum(w.nbytes for w in [*(w for layer in self.layers for w in layer), self.head])

    def _weight(self, rows: int, columns: int, bits: int = 0, group: int = 0) -> Weight:
        bits = bits or self.shape.bits
        group = group or self.shape.group
        packed = mx.random.randint(0, 2**31 - 1, (rows, columns * bits // 32)).astype(mx.uint32)
        scales = mx.full((rows, columns // group), 0.01 / 2**bits, mx.float16)
        weight = Weight(packed, scales, -scales * 2 ** (bits - 1), bits, group)
        mx.eval(*weight.arrays)
        return self.ops.prepare(weight, mx.float32)

    def _node(self) -> LayersNode:
        layers = [
            LayerWeights(self.spec, self.norm, [qkv], out, None, self.norm, [gate_up], down, None)
            for qkv, out, gate_up, down in self.layers
        ]
        node = self.ops.fuse(layers, 1e-5, "silu")
        if node is None:
            raise SystemExit(f"the kernels do not run here: {native.status()}")
        return node

    def cache(self, capacity: int, batch: int = 1) -> Cache:
        s = self.shape
        shape = (batch, s.kv_heads, capacity, s.head_dim)
        dtype = self.ops.kv_format(mx.float32).dtype
        cache = [mx.zeros(shape, dtype) for _ in range(s.layers)], [mx.zeros(shape, dtype) for _ in range(s.layers)]
        mx.eval(cache)
        return cache

    def forward(self, x: mx.array, cache: Cache, offset: int) -> mx.array:
        """Run (B, T, E) -> logits of the last positions (B, 1, V). Writes the cache's buffers."""
        phase: Phase = "decode" if x.shape[1] == 1 else "prefill"
        x = self.node(x, *cache, offset, [0] * self.shape.layers, phase, -1)
        return self.ops.norm_linear(x[:, -1:], self.norm, 1e-5, self.head)

    def seconds(self, rows: int = 1, depth: int = 0, batch: int = 1) -> float:
        """Time a pass of `rows` tokens of each of `batch` sequences over a cache of `depth` entries."""
        cache = self.cache(depth + rows, batch)
        x = mx.random.normal((batch, rows, self.shape.width))
        mx.eval(x)
        return best_seconds(lambda: mx.eval(self.forward(x, cache, depth)), self.budget)

    def pass_of(self, depth: int, sequences: int = 1) -> Callable[[], None]:
        """Return a step of several sequences, each over `depth` entries in interleaved blocks."""
        s = self.shape
        store = KVStore([KVKind(None, s.kv_heads, s.head_dim)] * s.layers, self.ops.kv_format(mx.float32))
        each = depth // BLOCK + 1
        store.groups[0].slabs.append(self.ops.slab(each * sequences, store.groups[0].block_shape, store.format.dtype))
        tables = [[list(range(i, each * sequences, sequences))] for i in range(sequences)]
        x = mx.random.normal((1, sequences, s.width))
        mx.eval(x)

        def step() -> None:
            rows = Pass([SequenceRows(1, depth, "decode", table) for table in tables], store)
            mx.eval(
                self.ops.norm_linear(self.node.run_pass(x, rows, slice(None), (), 0, -1)[0], self.norm, 1e-5, self.head)
            )

        return step

    def pass_seconds(self, depth: int, sequences: int = 1) -> float:
        return best_seconds(self.pass_of(depth, sequences), self.budget)


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return the best of as many runs as fit."""
    run()
    best = float("inf")
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def read_gb_s(threads: int, streams: int, seconds: float) -> float:
    """Return the upper quartile of passes over STREAMED_BYTES, like the stored peak."""
    memory = native.streaming_read(STREAMED_BYTES, threads, streams)
    begin = time.perf_counter()
    rates = [memory.bytes / memory.one_pass() / 1e9]
    while time.perf_counter() - begin < seconds:
        rates.append(memory.bytes / memory.one_pass() / 1e9)
    return sorted(rates)[len(rates) * 3 // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--threads", type=int, default=0, help="0: one per physical core")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each figure")
    options = parser.parse_args()
    seconds = options.seconds
    native.set_threads(options.threads)
    threads = native.status().threads or 1
    streams = {count: read_gb_s(threads, count, seconds) for count in (1, 2, 4, 8)}
    peak = max(streams.values())
    model = Model(SHAPES[options.shape], seconds)
    print(f"{native.status()}\nweights {model.bytes / 1e6:.1f} MB")
    for count, rate in streams.items():
        print(f"streaming read, {count} streams a thread  {rate:5.1f} GB/s")

    for part, name in enumerate(["norm + qkv", "output + residual", "norm + gated unit", "down + residual"]):
        weights = [layer[part] for layer in model.layers]
        x = mx.random.normal((1, 1, weights[0].columns))
        mx.eval(x)
        ones = mx.ones(x.shape[-1])
        taken = best_seconds(
            lambda w=weights, x=x, n=ones: mx.eval([model.ops.norm_linear(x, n, 1e-5, m) for m in w]), seconds
        )
        rate = sum(w.nbytes for w in weights) / taken / 1e9
        print(f"{name:18} {taken / len(weights) * 1e6:8.1f} us  {rate:5.1f} GB/s  {rate / peak:4.0%} of streaming read")
    x = mx.random.normal((1, 1, model.shape.width))
    mx.eval(x)
    taken = best_seconds(lambda: mx.eval(model.ops.linear(x, model.head)), seconds)
    print(f"{'logits':18} {taken * 1e6:8.1f} us  {model.head.nbytes / taken / 1e9:5.1f} GB/s")
    taken = best_seconds(lambda: model.forward(x, model.cache(1), 0), seconds)
    print(f"{'graph building':18} {taken * 1e6:8.1f} us a step")

    for depth in (0, 512, 2048, 4096):
        taken = model.seconds(depth=depth)
        rate = model.bytes / taken / 1e9
        print(f"step at depth {depth:5}  {taken * 1e3:7.2f} ms  {1 / taken:6.1f} tok/s  {rate:5.1f} GB/s of weights")
        blocks = model.pass_seconds(depth)
        print(f"      in blocks     {blocks * 1e3:7.2f} ms  {1 / blocks:6.1f} tok/s  {taken / blocks:5.2f} the speed")
    one = model.pass_seconds(0)
    for batch in (2, 4, 8, 16):
        taken = model.pass_seconds(0, batch)
        rate = batch / taken
        print(f"step of {batch:2} sequences {taken * 1e3:6.2f} ms  {rate:6.0f} tok/s  {taken / one:.1f} times one's")
    for rows in (8, 64, 512):
        taken = model.seconds(rows=rows)
        print(f"pass of {rows:4} rows   {taken * 1e3:8.2f} ms  {rows / taken:6.0f} rows/s")
    print_table()


if __name__ == "__main__":
    main()
