"""Decode speed on Macs, computed: `python -m tests.bench.metal_simulator [--context N]`. Measures nothing.

A decode loop with one step built ahead is played on a model of MLX's Metal backend, for headrace and for mlx-lm's
classes. Kernels and chains are those of `tests.bench.graph_counts`, bytes those of the catalog. Assumptions:

- A kernel occupies the GPU for 1 us beside its bytes, and 1 us more if it waits for the kernel before.
- Weights and K/V arrive at 85 % of the chip's nominal bandwidth.
- The host makes a node in 1 us and encodes a kernel in 2 us. It encodes step n + 1 while the GPU runs step n.
- A command buffer ends after 40 kernels, or inputs of 40 Mi elements (50 of each on Max and Ultra chips), as MLX's
  source has it. Ten may be in flight; a buffer starts 3 us after its commit at the earliest.
- K/V that an unfinished command buffer reads cannot be donated: a write then copies the layer's buffers whole.
- headrace limits the kernels of a command buffer, see `runtime.machine.hardware.kernels_per_buffer`. Its K/V have
  room for 1,024 tokens of output, mlx-lm's for up to 256.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.models.cost.step_shape import StepShape
from headrace.models.registry.catalog import load_catalog
from headrace.runtime.machine.chips import table
from headrace.runtime.machine.hardware import kernels_per_buffer
from tests.bench.graph_counts import Counts, count_layer, mlx_lm_step, own_step

MODELS = {  # catalog name -> family of `graph_counts`
    "qwen3-0.6b": "qwen3",
    "llama-3.2-1b": "llama",
    "gemma-3-1b": "gemma3",
    "llama-3.2-3b": "llama",
    "qwen3-4b": "qwen3",
    "mistral-7b": "llama",
    "qwen2.5-7b": "qwen2",
    "gemma-4-e4b": "gemma4",
    "llama-3.1-8b": "llama",
    "qwen3-8b": "qwen3",
    "gpt-oss-20b": "gpt-oss",
    "qwen3-30b-a3b": "qwen3-moe",
}
CHIPS = ("Apple M1", "Apple M2", "Apple M3", "Apple M4", "Apple M5", "Apple M1 Max", "Apple M4 Max")
KERNEL_S = 1e-6
WAIT_S = 1e-6
NODE_S = 1e-6
ENCODE_S = 2e-6
COMMIT_S = 3e-6
SHARE = 0.85  # of the nominal bandwidth
IN_FLIGHT = 10  # command buffers
STEPS = 8  # simulated; the last ones are the result
HEAD_KERNELS = 4  # embedding, last norm, logits, choice


@dataclass(frozen=True)
class Kernel:
    """One launch. elements: of its inputs. attends, writes: the layer whose K/V it reads or writes, or None."""

    nbytes: float
    elements: float
    waits: bool
    attends: int | None = None
    writes: int | None = None


@dataclass(frozen=True)
class Chip:
    """Memory bandwidth in bytes/s, and MLX's limits of a command buffer."""

    bandwidth: float
    most_ops: int
    most_mi: int


@dataclass
class Buffer:
    """An open or committed command buffer."""

    ops: int = 0
    elements: float = 0.0
    seconds: float = 0.0
    done: float = math.inf


def kernels_of(shape: StepShape, counts: Counts, context: int, capacity: int) -> list[Kernel]:
    """Return the kernels of a step: all layers, then the head."""
    count = round(counts.kernels)
    chain = round(counts.levels)
    head = sum(matrix.count * matrix.nbytes for matrix in shape.matrices if matrix.output)
    weights = (shape.cost.weight_bytes - head) / shape.layers
    row = shape.cost.kv_bytes_per_token / shape.layers
    read = shape.cost.kv_bytes_read(context) / shape.layers
    writing = count // 3
    layers = []
    for layer in range(shape.layers):
        for place in range(count):
            attends = layer if place == writing + 1 else None
            held = capacity * row / 2 if attends is not None else 0.0
            layers.append(
                Kernel(
                    nbytes=weights / count + (read if attends is not None else 0.0),
                    elements=weights / count / 4 + held,
                    waits=place < chain,
                    attends=attends,
                    writes=layer if place == writing else None,
                )
            )
    return [*layers, *(Kernel(head / HEAD_KERNELS, head / HEAD_KERNELS / 4, waits=True) for _ in range(HEAD_KERNELS))]


def step_seconds(kernels: list[Kernel], nodes: float, copy_bytes: float, chip: Chip) -> tuple[float, float]:
    """Return (seconds of a step, share of K/V writes that copied). copy_bytes: of a layer's whole buffers."""
    buffers: list[Buffer] = []
    readers: dict[int, Buffer] = {}
    ends: list[float] = []
    now = free = 0.0
    copies = writes = 0
    for step in range(STEPS):
        now = max(now, ends[step - 2] if step > 1 else 0.0) + nodes * NODE_S
        buffer = Buffer()
        reads: dict[int, Buffer] = {}
        for kernel in kernels:
            now += ENCODE_S
            seconds = KERNEL_S + WAIT_S * kernel.waits + kernel.nbytes / chip.bandwidth
            if kernel.writes is not None and step >= STEPS // 2:
                writes += 1
            if kernel.writes is not None and (reader := readers.get(kernel.writes)) and reader.done > now:
                seconds += 2 * copy_bytes / chip.bandwidth
                copies += step >= STEPS // 2
            buffer.ops += 1
            buffer.elements += kernel.elements
            buffer.seconds += seconds
            if kernel.attends is not None:
                reads[kernel.attends] = buffer
            last = kernel is kernels[-1]
            if last or buffer.ops > chip.most_ops or buffer.elements / 2**20 > chip.most_mi:
                free = buffer.done = max(now + COMMIT_S, free) + buffer.seconds
                buffers.append(buffer)
                if len(buffers) > IN_FLIGHT:
                    now = max(now, buffers[-1 - IN_FLIGHT].done)
                buffer = Buffer()
        readers = reads
        ends.append(free)
    middle = STEPS // 2 - 1
    return (ends[-1] - ends[middle]) / (STEPS - 1 - middle), copies / max(1, writes)


def chip_of(name: str) -> Chip:
    """Return a chip of the table."""
    bandwidth = max(row.bandwidth for row in table() if row.name == name)
    large = name.endswith(("Max", "Ultra"))
    return Chip(SHARE * bandwidth, 50 if large else 40, 50 if large else 40)


def counts_of(families: set[str]) -> dict[str, tuple[Counts, Counts]]:
    """Return counts of a layer by family: headrace's and mlx-lm's."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            family: (count_layer(own_step, family, Path(folder)), count_layer(mlx_lm_step, family, Path(folder)))
            for family in sorted(families)
        }


def speeds(shape: StepShape, counts: tuple[Counts, Counts], context: int, chip: Chip) -> list[tuple[float, float]]:
    """Return (tokens/s, share of copying writes) of headrace and of mlx-lm."""
    found = []
    ours = replace(chip, most_ops=kernels_per_buffer(shape.layers))
    for each, ahead, limits in zip(counts, (1024, 256), (ours, chip), strict=True):
        capacity = -(-(context + ahead) // 256) * 256
        kernels = kernels_of(shape, each, context, capacity)
        copied = capacity * shape.cost.kv_bytes_per_token / shape.layers
        seconds, copies = step_seconds(kernels, each.nodes * shape.layers, copied, limits)
        found.append((1 / seconds, copies))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    catalog = load_catalog()
    counts = counts_of(set(MODELS.values()))
    print(f"computed tokens/s at {options.context} tokens of context, headrace : mlx-lm (writes that copy K/V)")
    print(f"{'':<18}" + "".join(f"{name.removeprefix('Apple '):>22}" for name in CHIPS))
    for model, family in MODELS.items():
        cells = []
        for name in CHIPS:
            (own, copies), (other, other_copies) = speeds(
                catalog[model].step_shape, counts[family], options.context, chip_of(name)
            )
            cells.append(f"{own:.1f} : {other:.1f} ({copies:.0%} {other_copies:.0%})")
        print(f"{model:<18}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
