"""Predicted speed of a model that several machines share.

Tensor parallel: each machine has a part of the heads, feed-forwards, experts and vocabulary, in proportion to its
memory bandwidth in whole K/V heads, and two all_sums a layer join their results. Pipeline: each machine has some
layers, in proportion to its memory bandwidth as far as its memory goes, and hidden states pass from one to the next
and back to the first. Both are computed from shapes, as `app.predict.prediction` does for one machine; the link's part
is latency and bytes / bandwidth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.app.predict.links import Link
from headrace.app.predict.prediction import Target, bounded_seconds
from headrace.models.cost.costs import working_memory
from headrace.models.cost.step_shape import StepShape, total
from headrace.runtime.metrics.cost import Matrix

Way = Literal["alone", "tensor", "pipeline"]
SPLITS: tuple[Way, ...] = ("tensor", "pipeline")

_SQUARES = 8  # bytes of a row's sums of squares of queries and keys
_ELEMENT = 2  # bytes of an element of the hidden states
_PEAK_SHARE = (
    0.81  # of a GPU's peak in prefill: Llama 3.3 70B on an M3 Ultra, github.com/geerlingguy/beowulf-ai-cluster
)


@dataclass(frozen=True, slots=True)
class HostsPrediction:
    """One way of running a shape on machines, for one sequence with `context` cached tokens.

    speed: tokens per second.
    expected: False for a roofline, an upper bound.
    link_share: part of a step in which machines wait for the link.
    layers: of each machine, all of them in tensor parallel.
    memory: bytes of each.
    fits: None if a machine's memory is unknown.
    together: tokens per second with as many sequences as machines; those of a pipeline are in different machines at a
        time.
    prefill: prompt tokens per second, None without published FLOP/s.
    prefill_link_s: part of a prompt's time on the link.
    """

    way: Way
    machines: tuple[str, ...]
    speed: float
    expected: bool
    link_share: float
    layers: tuple[int, ...]
    memory: tuple[int, ...]
    fits: bool | None
    together: float
    prefill: float | None
    prefill_link_s: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A machine's part of a step. nbytes: read and written. seconds: of computing it."""

    nbytes: float
    memory: int
    seconds: float
    expected: bool


def predict_hosts(
    shape: StepShape,
    targets: Sequence[Target],
    link: Link,
    context: int,
    *,
    way: Way,
    prompt: int = 512,
) -> HostsPrediction:
    """Predict one way. `alone` takes one target. prompt: tokens of the prefill."""
    ranks = len(targets)
    hidden = _ELEMENT * _hidden(shape)
    shares: Sequence[float]
    if way == "pipeline":
        layers = split_layers(shape, targets, context)
        parts = [_pipeline_part(shape, target, context, layers, i) for i, target in enumerate(targets)]
        compute = sum(part.seconds for part in parts)
        together = 1 / (max(part.seconds for part in parts) + link.send_s(hidden))
    else:
        layers = (shape.layers,) * ranks
        shares = tensor_shares(shape, targets)
        parts = [_tensor_part(shape, t, context, share, 1) for t, share in zip(targets, shares, strict=True)]
        compute = max(part.seconds for part in parts)
        many = zip(targets, shares, strict=True)
        batch = max(_tensor_part(shape, t, context, share, ranks).seconds for t, share in many)
        together = ranks / (batch + _tensor_waits(shape, link, ranks, ranks))
    on_link = waits(shape, link, ranks, way)
    prompt_waits = waits(shape, link, ranks, way, prompt)
    shares = [count / shape.layers for count in layers] if way == "pipeline" else shares
    computing = _prefill_seconds(shape, targets, shares, prompt, way)
    room = [t.memory is None or part.memory <= t.memory for t, part in zip(targets, parts, strict=True)]
    fits: bool | None = all(room)
    if fits and any(target.memory is None for target in targets):
        fits = None  # unknown
    return HostsPrediction(
        way=way,
        machines=tuple(target.name for target in targets),
        speed=1 / (compute + on_link),
        expected=all(part.expected for part in parts),
        link_share=on_link / (compute + on_link),
        layers=layers,
        memory=tuple(part.memory for part in parts),
        fits=fits,
        together=together,
        prefill=prompt / (computing + prompt_waits) if computing else None,
        prefill_link_s=prompt_waits,
    )


def tensor_shares(shape: StepShape, targets: Sequence[Target]) -> list[float]:
    """Return each machine's part of the heads, at least one, in proportion to bandwidth.

    Parts are whole K/V heads, or whole heads if there are more machines than K/V heads.
    """
    count = shape.kv_heads if shape.kv_heads >= len(targets) else shape.heads
    ranks = len(targets)
    if count <= ranks:
        return [1 / ranks] * ranks
    return [(1 + heads) / count for heads in _apportioned(count - ranks, _beyond_one(count, targets))]


def waits(shape: StepShape, link: Link, ranks: int, way: Way, rows: int = 1) -> float:
    """Return the time on the link of a pass of so many rows."""
    if way == "pipeline":
        return ranks * link.send_s(rows * _ELEMENT * _hidden(shape))
    return _tensor_waits(shape, link, ranks, rows)


def split_layers(shape: StepShape, targets: Sequence[Target], context: int) -> tuple[int, ...]:
    """Return each machine's layers: reads in proportion to bandwidth, and no more than its memory holds.

    The first machine reads the output projection, too, so it has fewer layers. If all together have too little memory,
    layers are in proportion to memory.
    """
    max_layers = [_most_layers(shape, target, context, first=i == 0) for i, target in enumerate(targets)]
    if sum(max_layers) < shape.layers:
        return _apportioned(shape.layers, [float(room or 1) for room in max_layers])
    wanted = [0] * len(targets)
    free = set(range(len(targets)))
    left = shape.layers
    while free:
        share = _apportioned(
            left, _layers_to_read(shape, left, [t.bandwidth * (i in free) for i, t in enumerate(targets)])
        )
        full = {i for i in free if share[i] >= max_layers[i]}
        if not full or all(share[i] == max_layers[i] for i in full):
            return tuple(share[i] if i in free else wanted[i] for i in range(len(targets)))
        for i in full:
            wanted[i] = max_layers[i]
        free = free - full
        left = left - sum(max_layers[i] for i in full)
    return tuple(wanted)


def _layers_to_read(shape: StepShape, layers: int, bandwidths: Sequence[float]) -> list[float]:
    """Return the layers that machines read in equal times, the first with the output projection; 0 for bandwidth 0."""
    output = sum(matrix.nbytes for matrix in shape.matrices if matrix.output)
    others = sum(matrix.read_bytes(1) for matrix in shape.matrices if not matrix.output) + shape.vector_bytes
    alone = bandwidths[0] and not shape.stock  # every rank of mlx-lm's pipelines has the output projection
    head = output / (others / shape.layers) if alone else 0.0  # in layers
    shares = [(layers + head) * bandwidth / sum(bandwidths) for bandwidth in bandwidths]
    return [max(1.0, shares[0] - head) if bandwidths[0] else 0.0, *shares[1:]]


def _beyond_one(count: int, targets: Sequence[Target]) -> list[float]:
    """Return weights of the heads beyond the first of each machine."""
    whole = sum(target.bandwidth for target in targets)
    beyond = [max(0.0, count * target.bandwidth / whole - 1) for target in targets]
    return beyond if sum(beyond) else [1.0] * len(targets)


def best(predictions: Sequence[HostsPrediction]) -> HostsPrediction:
    """Return the fastest that fits, or the fastest of all."""
    return max(
        [prediction for prediction in predictions if prediction.fits is not False] or predictions,
        key=lambda prediction: prediction.speed,
    )


def _hidden(shape: StepShape) -> int:
    return next(matrix.columns for matrix in shape.matrices if matrix.output)


def _table(shape: StepShape) -> int:
    """Return the bytes of the embedding table; 0 if it is the output projection."""
    return shape.resident_bytes - shape.vector_bytes - sum(m.count * m.nbytes for m in shape.matrices)


def _share(matrix: Matrix, share: float) -> float:
    """Return the part of a matrix of a machine with this share in tensor parallel."""
    return share if matrix.divided else 1.0


def _tensor_part(shape: StepShape, target: Target, context: int, share: float, batch: int) -> _Part:
    cost = shape.cost
    kv_share = math.ceil(shape.kv_heads * share - 1e-9) / shape.kv_heads  # K/V heads are not divided
    read = sum(matrix.read_bytes(batch) * _share(matrix, share) for matrix in shape.matrices) + shape.vector_bytes
    kv = batch * kv_share * (cost.kv_bytes_read(context) + cost.kv_bytes_written())
    weight_bytes = (
        sum(matrix.count * matrix.nbytes * _share(matrix, share) for matrix in shape.matrices) + shape.vector_bytes
    )
    memory = weight_bytes + _table(shape) * share + batch * kv_share * cost.kv_bytes(context)
    return _part(shape, target, read + kv, memory)


def _pipeline_part(shape: StepShape, target: Target, context: int, layers: Sequence[int], rank: int) -> _Part:
    """Return a machine's layers; the first has the embedding table and the output projection."""
    cost = shape.cost
    part = layers[rank] / shape.layers
    output = sum(matrix.nbytes for matrix in shape.matrices if matrix.output) if rank == 0 else 0
    read = sum(matrix.read_bytes(1) for matrix in shape.matrices if not matrix.output) + shape.vector_bytes
    weight_bytes = sum(m.count * m.nbytes for m in shape.matrices if not m.output) + shape.vector_bytes
    kv = cost.kv_bytes_read(context) + cost.kv_bytes_written()
    memory = part * (weight_bytes + cost.kv_bytes(context)) + output + (_table(shape) if rank == 0 else 0)
    return _part(shape, target, part * (read + kv) + output, memory, part)


def _part(shape: StepShape, target: Target, nbytes: float, memory: float, share: float = 1.0) -> _Part:
    """Return a part of a step. share: of the layers, hence of a step's fixed cost."""
    seconds, is_expected = bounded_seconds(shape, target, nbytes, share)
    return _Part(nbytes, int(memory) + working_memory(shape, on_gpu=target.apple), seconds, is_expected)


def _tensor_waits(shape: StepShape, link: Link, ranks: int, rows: int) -> float:
    """Return a pass's time on the link: sums of its rows, for the embedding, two a layer, and norms; the logits."""
    if ranks == 1:
        return 0.0
    vocabulary = next(matrix.rows for matrix in shape.matrices if matrix.output)
    sums = (2 * shape.layers + 1) * link.all_sum_s(rows * _ELEMENT * _hidden(shape), ranks)
    norms = shape.joint_norms * link.all_sum_s(rows * _SQUARES, ranks)
    return sums + norms + link.all_gather_s(_ELEMENT * vocabulary, ranks)


def allowed(shape: StepShape, targets: Sequence[Target]) -> list[Way]:
    """Return the ways of splitting that all machines can run."""
    native, gpu = shape.splits
    return [way for way in SPLITS if all(way in (gpu if target.apple else native) for target in targets)]


def _prefill_seconds(
    shape: StepShape, targets: Sequence[Target], shares: Sequence[float], prompt: int, way: Way
) -> float | None:
    """Return the computing time of a prompt; None if a machine's FLOP/s are unknown."""
    _, flops = total(shape.prefill(prompt))
    peaks = [target.flops for target in targets]
    if not all(peaks):
        return None
    speeds = [_PEAK_SHARE * peak for peak in peaks if peak]
    times = [flops * share / speed for share, speed in zip(shares, speeds, strict=True)]
    return sum(times) if way == "pipeline" else max(times)


def _most_layers(shape: StepShape, target: Target, context: int, *, first: bool) -> int:
    """Return how many layers fit into a machine's memory."""
    if target.memory is None:
        return shape.layers
    weight_bytes = sum(m.count * m.nbytes for m in shape.matrices if not m.output) + shape.vector_bytes
    ends = _table(shape) + sum(m.nbytes for m in shape.matrices if m.output) if first else 0
    room = target.memory - working_memory(shape, on_gpu=target.apple) - ends
    return max(0, min(shape.layers, int(room // ((weight_bytes + shape.cost.kv_bytes(context)) / shape.layers))))


def _apportioned(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `count` in proportion to weights, by largest remainders."""
    exact = [count * weight / sum(weights) for weight in weights]
    whole = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in order[: count - sum(whole)]:
        whole[i] += 1
    return tuple(whole)
