"""Processor time per weight by width, group size, rows and instruction set: `python -m tests.bench.widths`.

One thread multiplies a matrix that fits the caches, so that arithmetic is measured and not the memory.
"""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from headrace.runtime.metrics.telemetry import quantile
from headrace.runtime.ops import native
from headrace.runtime.ops.weights import Weight

SETS = ("avx512", "avx2", "neon", "portable")
WIDTHS = dict.fromkeys((2, 3, 4, 5, 6, 8), (32, 64, 128)) | {6: (16, 32, 64, 128)}
"""Group sizes by bits; groups of 16 are those of Q6_K."""
ROWS = (1, 2, 4, 8, 16, 64)
SHAPE = (2048, 1024)  # rows and columns of the matrix


def random_weight(bits: int, group: int) -> Weight:
    rows, columns = SHAPE
    packed = mx.random.randint(0, 2**31 - 1, (rows, columns * bits // 32)).astype(mx.uint32)
    scales = mx.full((rows, columns // group), 0.01 / 2**bits, mx.float16)
    weight = Weight(packed, scales, -scales * 2 ** (bits - 1), bits, group)
    mx.eval(*weight.arrays)
    return native.prepare(weight, mx.float32)


def product(weight: Weight, rows: int) -> Callable[[], None]:
    """Return a run of the norm and the product of so many rows of activations."""
    x = mx.random.normal((1, rows, weight.columns))
    norm = mx.ones(weight.columns)
    mx.eval(x, norm)
    return lambda: mx.eval(native.norm_linear(x, norm, 1e-5, weight))


def times_per_weight(runs: Sequence[Callable[[], None]], rounds: int, repeats: int) -> list[float]:
    """Return the lower eighth of processor times per weight of each run in nanoseconds, taken in turns.

    The least one is too low where a virtual machine's clock has gaps.
    """
    taken: list[list[float]] = [[] for _ in runs]
    for round in range(rounds + 1):
        for run, times in zip(runs, taken, strict=True):
            begin = time.process_time()
            for _ in range(repeats):
                run()
            if round:  # the first warms up
                times.append(time.process_time() - begin)
    weights = SHAPE[0] * SHAPE[1] * repeats
    return [quantile(sorted(times), 1 / 8) / weights * 1e9 for times in taken]


def print_table(rounds: int = 9, repeats: int = 2) -> None:
    """Print the times of all widths on all instruction sets that run here."""
    before = native.status()
    native.set_threads(1)
    kinds = [(bits, group) for bits, groups in WIDTHS.items() for group in groups]
    for name in SETS:
        if not native.use_instruction_set(name):
            continue
        print(f"{name}, ns of one core per weight; rows: " + "".join(f"{rows:>8}" for rows in ROWS))
        weights = [random_weight(bits, group) for bits, group in kinds]
        columns = [times_per_weight([product(each, rows) for each in weights], rounds, repeats) for rows in ROWS]
        for (bits, group), *times in zip(kinds, *columns, strict=True):
            print(f"{bits} bits, groups of {group:<4}" + " " * (len(name) + 16) + "".join(f"{t:>8.3f}" for t in times))
    native.set_threads(before.threads or 0)
    native.use_instruction_set(before.instruction_set or "")


if __name__ == "__main__":
    print_table()
