"""Predicted speed of a model that several machines share.

Tensor parallel: each machine has a part of the heads, feed-forwards, experts and vocabulary, in proportion to its
memory bandwidth in whole K/V heads, and two all_sums a layer join their results. Pipeline: each machine has some
layers, in proportion to its memory bandwidth as far as its memory goes, and hidden states pass from one to the next
and back to the first. Both are computed from shapes, as `app.predict.prediction` does for one machine; the link's part
is latency and bytes / bandwidth. `headrace predict --hosts` shows it; `app.hosts.split_choice` takes its choice for a
run, so `tensor_shares` and `split_layers` also decide how a model is divided.

Guard: tests/app/predict/test_hosts.py.
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from headrace.app.predict.links import NetworkLink
from headrace.app.predict.prediction import TargetMachine, bounded_seconds
from headrace.models.cost.costs import working_memory
from headrace.models.cost.step_shape import StepShape, total
from headrace.runtime.metrics.cost import Matrix

SplitKind = Literal["alone", "tensor", "pipeline"]
SPLITS: tuple[SplitKind, ...] = ("tensor", "pipeline")

_SQUARES = 8  # bytes of a row's sums of squares of queries and keys
_ELEMENT = 2  # bytes of an element of the hidden states
# Part of a GPU's peak in prefill: Llama 3.3 70B on an M3 Ultra, github.com/geerlingguy/beowulf-ai-cluster
_PEAK_SHARE = 0.81


class HostsPrediction(Struct, frozen=True):
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

    way: SplitKind
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


class _Part(Struct, frozen=True):
    """A machine's part of a step.

    memory: bytes of its weights, cache and workspace.
    seconds: of reading and computing.
    expected: False for a roofline, an upper bound of the speed.
    """

    memory: int
    seconds: float
    expected: bool


def predict_hosts(
    shape: StepShape,
    targets: Sequence[TargetMachine],
    link: NetworkLink,
    context: int,
    *,
    way: SplitKind,
    prompt: int = 512,
) -> HostsPrediction:
    """Predict one way.

    shape: the model.
    targets: the machines, in the order of their ranks; one for `alone`.
    link: between each two of them.
    context: cached tokens of each sequence.
    way: of dividing the model.
    prompt: tokens of the prefill.
    """
    ranks = len(targets)
    if way == "pipeline":
        # A sequence passes one rank after the other; with several, all ranks compute, and the slowest sets the pace.
        layers = split_layers(shape, targets, context)
        shares = [count / shape.layers for count in layers]
        parts = [_pipeline_part(shape, target, context, layers, rank) for rank, target in enumerate(targets)]
        compute_s = sum(part.seconds for part in parts)
        together = 1 / (max(part.seconds for part in parts) + link.send_s(_hidden_bytes(shape)))
    else:
        layers = (shape.layers,) * ranks
        shares = tensor_shares(shape, targets)
        parts = _tensor_parts(shape, targets, context, shares, 1)
        compute_s = max(part.seconds for part in parts)
        batch_s = max(part.seconds for part in _tensor_parts(shape, targets, context, shares, ranks))
        together = ranks / (batch_s + _tensor_link_seconds(shape, link, ranks, ranks))

    link_s = link_seconds(shape, link, ranks, way)
    prefill_link_s = link_seconds(shape, link, ranks, way, prompt)
    prefill_s = _prefill_seconds(shape, targets, shares, prompt, way)
    return HostsPrediction(
        way=way,
        machines=tuple(target.name for target in targets),
        speed=1 / (compute_s + link_s),
        expected=all(part.expected for part in parts),
        link_share=link_s / (compute_s + link_s),
        layers=layers,
        memory=tuple(part.memory for part in parts),
        fits=_all_fit(targets, parts),
        together=together,
        prefill=None if prefill_s is None else prompt / (prefill_s + prefill_link_s),
        prefill_link_s=prefill_link_s,
    )


def _all_fit(targets: Sequence[TargetMachine], parts: Sequence[_Part]) -> bool | None:
    """Return whether every part fits its machine; None if those do whose memory is known, and not all is."""
    is_unknown = False
    for target, part in zip(targets, parts, strict=True):
        if target.memory is None:
            is_unknown = True
        elif part.memory > target.memory:
            return False
    return None if is_unknown else True


def tensor_shares(shape: StepShape, targets: Sequence[TargetMachine]) -> list[float]:
    """Return each machine's part of the heads, at least one, in proportion to bandwidth.

    Parts are whole K/V heads, or whole heads if there are more machines than K/V heads.
    """
    ranks = len(targets)
    num_heads = shape.kv_heads
    if num_heads < ranks:
        num_heads = shape.heads
    if num_heads <= ranks:
        return [1 / ranks] * ranks
    others = _apportioned(num_heads - ranks, _beyond_one(num_heads, targets))
    return [(1 + heads) / num_heads for heads in others]


def link_seconds(shape: StepShape, link: NetworkLink, ranks: int, way: SplitKind, rows: int = 1) -> float:
    """Return a pass's time on the link. rows: tokens of the pass; 1: a decode step of one sequence."""
    if way == "pipeline":
        return ranks * link.send_s(rows * _hidden_bytes(shape))
    return _tensor_link_seconds(shape, link, ranks, rows)


def split_layers(shape: StepShape, targets: Sequence[TargetMachine], context: int) -> tuple[int, ...]:
    """Return each machine's layers: reads in proportion to bandwidth, and no more than its memory holds.

    The first machine reads the output projection, too, so it has fewer layers. If all together have too little memory,
    layers are in proportion to memory.
    """
    max_layers = [_max_layers(shape, target, context, is_first=rank == 0) for rank, target in enumerate(targets)]
    if sum(max_layers) < shape.layers:
        return _apportioned(shape.layers, [float(max(1, count)) for count in max_layers])
    # Each turn divides the remaining layers among the machines with room, and fixes those that it fills.
    layers = [0] * len(targets)
    free = set(range(len(targets)))  # machines with memory left
    remaining = shape.layers
    while free:
        bandwidths = [target.bandwidth * (rank in free) for rank, target in enumerate(targets)]
        shares = _apportioned(remaining, _layers_to_read(shape, remaining, bandwidths))
        full = {rank for rank in free if shares[rank] > max_layers[rank]}
        if not full:
            for rank in free:
                layers[rank] = shares[rank]
            break
        # A machine that got exactly as much as it holds is full, too: the others share the excess.
        full |= {rank for rank in free if shares[rank] == max_layers[rank]}
        for rank in full:
            layers[rank] = max_layers[rank]
            remaining -= max_layers[rank]
        free -= full
    return tuple(layers)


def _layers_to_read(shape: StepShape, layers: int, bandwidths: Sequence[float]) -> list[float]:
    """Return the layers that machines read in equal times, the first with the output projection; 0 for bandwidth 0."""
    head = 0.0  # the output projection's bytes, in layers
    if bandwidths[0] and not shape.stock:  # every rank of mlx-lm's pipelines has the output projection
        head = _output_bytes(shape) / (_layer_reads(shape) / shape.layers)
    shares = [(layers + head) * bandwidth / sum(bandwidths) for bandwidth in bandwidths]
    if bandwidths[0]:
        shares[0] = max(1.0, shares[0] - head)
    return shares


def _beyond_one(count: int, targets: Sequence[TargetMachine]) -> list[float]:
    """Return weights of the heads beyond the first of each machine."""
    total_bandwidth = sum(target.bandwidth for target in targets)
    beyond = [max(0.0, count * target.bandwidth / total_bandwidth - 1) for target in targets]
    if not any(beyond):
        return [1.0] * len(targets)
    return beyond


def best(predictions: Sequence[HostsPrediction]) -> HostsPrediction:
    """Return the fastest that fits, or the fastest of all."""
    return max(predictions, key=lambda prediction: (prediction.fits is not False, prediction.speed))


def _hidden_bytes(shape: StepShape) -> int:
    """Return the bytes of a token's hidden state."""
    return _ELEMENT * next(matrix.columns for matrix in shape.matrices if matrix.output)


def _output_bytes(shape: StepShape) -> int:
    """Return the bytes of the output projection."""
    return sum(matrix.nbytes for matrix in shape.matrices if matrix.output)


def _layer_bytes(shape: StepShape) -> int:
    """Return the bytes of all layers' weights."""
    return sum(matrix.count * matrix.nbytes for matrix in shape.matrices if not matrix.output) + shape.vector_bytes


def _layer_reads(shape: StepShape) -> int:
    """Return the bytes of all layers' weights that a step of one sequence reads."""
    return sum(matrix.read_bytes(1) for matrix in shape.matrices if not matrix.output) + shape.vector_bytes


def _table_bytes(shape: StepShape) -> int:
    """Return the bytes of the embedding table; 0 if it is the output projection."""
    return shape.resident_bytes - shape.vector_bytes - sum(m.count * m.nbytes for m in shape.matrices)


def _share(matrix: Matrix, share: float) -> float:
    """Return the part of a matrix of a machine with this share in tensor parallel."""
    return share if matrix.divided else 1.0


def _tensor_parts(
    shape: StepShape, targets: Sequence[TargetMachine], context: int, shares: Sequence[float], batch: int
) -> list[_Part]:
    """Return each machine's part of a step of `batch` sequences. shares: of the heads."""
    cost = shape.cost
    parts = []
    for target, share in zip(targets, shares, strict=True):
        # K/V heads are not divided; 1e-9 is for shares that rounding puts just above a whole number.
        kv_share = math.ceil(shape.kv_heads * share - 1e-9) / shape.kv_heads
        read = sum(matrix.read_bytes(batch) * _share(matrix, share) for matrix in shape.matrices) + shape.vector_bytes
        kv = batch * kv_share * (cost.kv_bytes_read(context) + cost.kv_bytes_written())
        weight_bytes = sum(matrix.count * matrix.nbytes * _share(matrix, share) for matrix in shape.matrices)
        weight_bytes += shape.vector_bytes + _table_bytes(shape) * share
        memory = weight_bytes + batch * kv_share * cost.kv_bytes(context)
        parts.append(_part(shape, target, read + kv, memory))
    return parts


def _pipeline_part(shape: StepShape, target: TargetMachine, context: int, layers: Sequence[int], rank: int) -> _Part:
    """Return a machine's layers; the first has the embedding table and the output projection."""
    cost = shape.cost
    share = layers[rank] / shape.layers
    nbytes = share * (_layer_reads(shape) + cost.kv_bytes_read(context) + cost.kv_bytes_written())
    memory = share * (_layer_bytes(shape) + cost.kv_bytes(context))
    if rank == 0:
        nbytes += _output_bytes(shape)
        memory += _output_bytes(shape) + _table_bytes(shape)
    return _part(shape, target, nbytes, memory, share)


def _part(shape: StepShape, target: TargetMachine, nbytes: float, memory: float, share: float = 1.0) -> _Part:
    """Return a part of a step.

    shape: the model.
    target: the machine.
    nbytes: read and written in the step.
    memory: bytes of weights and cache.
    share: of the layers, hence of a step's fixed cost.
    """
    seconds, is_expected = bounded_seconds(shape, target, nbytes, share)
    return _Part(int(memory) + working_memory(shape, on_gpu=target.apple), seconds, is_expected)


def _tensor_link_seconds(shape: StepShape, link: NetworkLink, ranks: int, rows: int) -> float:
    """Return a pass's time on the link: sums of its rows, for the embedding, two a layer, and norms; the logits."""
    if ranks == 1:
        return 0.0
    vocabulary = next(matrix.rows for matrix in shape.matrices if matrix.output)
    sums = (2 * shape.layers + 1) * link.all_sum_s(rows * _hidden_bytes(shape), ranks)
    norms = shape.joint_norms * link.all_sum_s(rows * _SQUARES, ranks)
    return sums + norms + link.all_gather_s(_ELEMENT * vocabulary, ranks)


def possible_splits(shape: StepShape, targets: Sequence[TargetMachine]) -> list[SplitKind]:
    """Return the ways of splitting that all machines can run."""
    native, gpu = shape.splits
    return [way for way in SPLITS if all(way in (gpu if target.apple else native) for target in targets)]


def _prefill_seconds(
    shape: StepShape, targets: Sequence[TargetMachine], shares: Sequence[float], prompt: int, way: SplitKind
) -> float | None:
    """Return the computing time of a prompt; None if a machine's FLOP/s are unknown."""
    _, flops = total(shape.prefill(prompt))
    times = []
    for target, share in zip(targets, shares, strict=True):
        if not target.flops:
            return None
        times.append(flops * share / (_PEAK_SHARE * target.flops))
    return sum(times) if way == "pipeline" else max(times)


def _max_layers(shape: StepShape, target: TargetMachine, context: int, *, is_first: bool) -> int:
    """Return the number of layers that fit into a machine's memory."""
    if target.memory is None:
        return shape.layers
    room = target.memory - working_memory(shape, on_gpu=target.apple)
    if is_first:
        room -= _table_bytes(shape) + _output_bytes(shape)
    bytes_per_layer = (_layer_bytes(shape) + shape.cost.kv_bytes(context)) / shape.layers
    return max(0, min(shape.layers, int(room // bytes_per_layer)))


def _apportioned(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `count` in proportion to weights, by largest remainders."""
    exact = [count * weight / sum(weights) for weight in weights]
    whole = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])  # the largest first
    for index in by_remainder[: count - sum(whole)]:
        whole[index] += 1
    return tuple(whole)
