"""Time of a pass of several sequences by kind of work, on random weights.

    python -m tests.bench.pass_parts [--shape 135m|1b|3b] [--sequences 1,2,4,8,16] [--depth D] [--sets avx512,avx2]

The pool records the duration of every parallel region; then each matrix is multiplied alone, in all layers.
Instruction sets alternate. Medians of rounds; use an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from headrace.runtime.ops import native
from tests.bench.kernels import Model
from tests.bench.shapes import SHAPES

MATRICES = ("norm + qkv", "output + residual", "norm + gated unit", "down + residual")


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Return the median of so many runs."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e3


def parts_of(model: Model, sequences: int, depth: int, times: int) -> dict[str, float]:
    step = model.pass_of(depth, sequences)
    parts = {"pass": milliseconds(step, times)}
    native.measure_regions(True)
    began = time.perf_counter()
    for _ in range(times):
        step()
    whole = (time.perf_counter() - began) / times * 1e3
    regions = native.region_times()
    native.measure_regions(False)
    for kind in ("weights", "attention"):
        parts[f"regions: {kind}"] = regions[kind].wall_ns / times / 1e6
    parts["between regions"] = whole - sum(times_of.wall_ns for times_of in regions.values()) / times / 1e6
    parts["caller waits"] = sum(times_of.waiting_ns for times_of in regions.values()) / times / 1e6
    for part, name in enumerate(MATRICES):
        weights = [layer[part] for layer in model.layers]
        x = mx.random.normal((1, sequences, weights[0].columns))
        norm = mx.ones(x.shape[-1])
        mx.eval(x, norm)
        parts[name] = milliseconds(
            lambda w=weights, x=x, n=norm: mx.eval([model.ops.norm_linear(x, n, 1e-5, m) for m in w]), times
        )
    x = mx.random.normal((sequences, 1, model.shape.width))
    mx.eval(x)
    parts["logits"] = milliseconds(lambda: mx.eval(model.ops.linear(x, model.head)), times)
    logits = model.ops.linear(x, model.head).reshape(sequences, -1)
    mx.eval(logits)
    parts["choice, greedy"] = milliseconds(lambda: mx.eval(model.ops.greedy(logits)), times)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--sequences", default="1,2,4,8,16")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--sets", default="", help="instruction sets; empty: the one in use")
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = Model(SHAPES[options.shape], 0)
    sets = options.sets.split(",") if options.sets else [native.status().instruction_set or ""]
    for sequences in map(int, options.sequences.split(",")):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sets}
        for _ in range(options.rounds):
            for name in sets:
                if not native.use_instruction_set(name):
                    raise SystemExit(f"this processor has no {name}")
                found[name].append(parts_of(model, sequences, options.depth, options.times))
        print(f"{sequences} sequences, depth {options.depth}, ms: " + ", ".join(sets))
        for part in found[sets[0]][0]:
            figures = [statistics.median(parts[part] for parts in found[name]) for name in sets]
            print(f"  {part:20}" + "".join(f"{figure:9.3f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
