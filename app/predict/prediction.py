"""Predicted decode speed and memory of a model's shape on a chip.

Roofline: peak bandwidth over bytes per step, an upper bound. Expected: from this machine's own step-cost fit, or else
from constants fitted to published mlx-lm figures on Apple chips (`app.predict.published`). Other chips get the
roofline only.

A `StepShape` (`models.cost`) is the model, a `TargetMachine` the machine, a `Prediction` both.

Guard: tests/app/predict/test_predict.py.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from headrace.app.predict.fit_store import MeasuredFit
from headrace.app.predict.published import ENGINE, assumptions, error_line
from headrace.models.cost.costs import working_memory
from headrace.models.cost.step_shape import StepShape
from headrace.runtime.metrics.cost import step_limit
from headrace.runtime.metrics.units import percent
from headrace.runtime.ops.kv_format import Q8, KVFormat

# The part of memory that macOS gives the GPU by default (recommendedMaxWorkingSetSize): 10,922 MB of 16 GB, 21,845 of
# 32, 49,152 of 64. SMALL_MAC_GB is the largest size with the smaller part.
SMALL_MAC_GB = 36
SMALL_MAC_SHARE = 2 / 3
LARGE_MAC_SHARE = 0.75


class TargetMachine(Struct, frozen=True):
    """A machine to predict for.

    name: of the chip, or `this machine`.
    bandwidth: bytes per second.
    memory: bytes for weights and cache; None is unknown.
    apple: an Apple chip, whose GPU runs the model.
    fit: measured cost of a step; None is unknown.
    measured: bandwidth and FLOP/s were measured here, and are not the vendor's.
    flops: peak FLOP/s of matrix products; None is unknown and limits nothing.
    chip: the name of this machine's chip.
    busy: other programs slowed the measurement.
    """

    name: str
    bandwidth: float
    memory: int | None
    apple: bool
    fit: MeasuredFit | None = None
    measured: bool = False
    flops: float | None = None
    chip: str = ""
    busy: bool = False


Bound = Literal["weights", "K/V", "compute"]


class Prediction(Struct, frozen=True):
    """One shape on one target.

    context: cached tokens of each sequence.
    batch: sequences per step.
    step_bytes: weights and all sequences' K/V, read and written in a step.
    weight_bytes: of them, weights.
    kv_bytes: of them, K/V.
    step_flops: of all sequences.
    bound: the largest term of the roofline.
    roofline: upper bound, tokens per second of all sequences.
    expected: tokens per second of all sequences; None without measured or published figures, and if it does not fit.
    memory: bytes of weights, cache and workspace.
    fits: None if the target's memory is unknown.
    busy: other programs slowed the measurement of the bandwidth, so the machine may exceed the roofline when idle.
    """

    context: int
    batch: int
    step_bytes: int
    weight_bytes: int
    kv_bytes: int
    step_flops: int
    bound: Bound
    roofline: float
    expected: float | None
    memory: int
    fits: bool | None
    busy: bool

    @property
    def speed(self) -> float:
        """The expected speed, or its upper bound if none is expected."""
        if self.expected is None:
            return self.roofline
        return self.expected


def predict(shape: StepShape, target: TargetMachine, context: int, batch: int = 1) -> Prediction:
    """Predict the total speed of `batch` sequences, each with `context` tokens in the cache."""
    cost = shape.cost
    # Sequences share one pass, or take turns with one pass each, which reads the weights again.
    passes = batch if shape.takes_turns(on_gpu=target.apple) else 1
    weights = passes * shape.weight_bytes(batch // passes)
    kv = batch * (cost.kv_bytes_read(context) + cost.kv_bytes_written())
    flops = batch * cost.step_flops(context)
    limit = step_limit(weights + kv, flops, target.bandwidth, target.flops)
    memory = shape.resident_bytes + batch * cost.kv_bytes(context) + working_memory(shape, on_gpu=target.apple)
    fits = None if target.memory is None else memory <= target.memory
    expected = None
    pass_s = step_seconds(shape, target, (weights + kv) / passes)
    if pass_s is not None and fits is not False:
        expected = batch / max(passes * pass_s, limit.seconds)  # the roofline is an upper bound
    bound: Bound
    if limit.roof == "arithmetic":
        bound = "compute"
    elif weights >= kv:
        bound = "weights"
    else:
        bound = "K/V"
    return Prediction(
        context=context,
        batch=batch,
        step_bytes=weights + kv,
        weight_bytes=weights,
        kv_bytes=kv,
        step_flops=flops,
        bound=bound,
        roofline=batch / limit.seconds,
        expected=expected,
        memory=memory,
        fits=fits,
        busy=target.measured and target.busy,
    )


def bounded_seconds(shape: StepShape, target: TargetMachine, nbytes: float, share: float = 1.0) -> tuple[float, bool]:
    """Return (time of a step that moves `nbytes`, at least that of reading, whether it is expected rather than that).

    share: part of the layers that the step runs.
    """
    roofline_s = nbytes / target.bandwidth
    expected_s = step_seconds(shape, target, nbytes, share)
    if expected_s is None:
        return roofline_s, False
    return max(expected_s, roofline_s), True


def step_seconds(shape: StepShape, target: TargetMachine, nbytes: float, share: float = 1.0) -> float | None:
    """Return the expected time of a step that moves `nbytes`, from this machine's fit or published constants.

    share: see `bounded_seconds`.
    """
    if target.fit is not None:
        return target.fit.seconds(nbytes, share)
    if not target.apple:
        return None
    chip = target.chip or target.name
    layers = round(share * shape.layers)
    return assumptions(ENGINE).seconds(nbytes, layers, shape.family, chip, target.bandwidth, mixture=shape.mixture)


def largest_context(shape: StepShape, target: TargetMachine) -> int | None:
    """Return the longest context that fits, up to the model's limit; 0 if the weights do not fit."""
    room = _room_for_kv(shape, target)
    if room is None:
        return None
    return shape.cost.longest_context(room, shape.context_length)


def max_sequences(shape: StepShape, target: TargetMachine, context: int) -> int | None:
    """Return how many sequences of `context` tokens fit; 0 if the weights do not; None if unknown."""
    room = _room_for_kv(shape, target)
    if room is None:
        return None
    return max(0, room // max(1, shape.cost.kv_bytes(context)))


def _room_for_kv(shape: StepShape, target: TargetMachine) -> int | None:
    """Return the bytes of memory that weights and program leave; None if unknown."""
    if target.memory is None:
        return None
    return target.memory - shape.resident_bytes - working_memory(shape, on_gpu=target.apple)


class Lever(Struct, frozen=True):
    """A change: the shape after it, and the number of sequences per step."""

    name: str
    shape: StepShape
    batch: int = 1


def levers(shape: StepShape) -> list[Lever]:
    """Return possible changes: fewer bits, a smaller cache, batching."""
    return [
        Lever("weights at 8 bits", shape.stored_at(8)),
        Lever("weights at 4 bits", shape.stored_at(4)),
        *(Lever("KV cache at 8 bits", shape.with_kv(kind)) for kind in _eight_bits(shape)),
        Lever("4 sequences per step", shape, batch=4),
    ]


def fitting_kv(shape: StepShape, target: TargetMachine, context: int, sequences: int = 1) -> KVFormat:
    """Return the first K/V format in which the sequences fit, or the smallest."""
    for kind in shape.kv_formats:
        fitting = max_sequences(shape.with_kv(kind), target, context)
        if fitting is None or fitting >= sequences:
            return kind
    return shape.kv_formats[-1]


def _eight_bits(shape: StepShape) -> list[KVFormat]:
    """Return the 8-bit K/V format; nothing if K/V are packed already or cannot be."""
    if shape.kv_format.packed:
        return []
    return [kind for kind in shape.kv_formats if kind.name == Q8.name]


def summarise_assumptions(targets: Sequence[TargetMachine], kv: KVFormat) -> list[str]:
    """Return lines on the basis of the figures."""
    assumed = assumptions(ENGINE)
    lines = []
    if kv.packed:
        lines.append(f"K/V stored as {kv.name}")
    if fit := next((target.fit for target in targets if target.fit), None):
        lines.append(
            f"this machine: {fit.fixed_s * 1e3:.2f} ms + bytes / {fit.bytes_per_second / 1e9:.1f} GB/s, "
            f"measured {fit.created} by `{fit.command}`, the fastest recent run"
        )
        if not fit.quiet:
            lines.append("the machine was busy or slowed down in that run: expected speeds may be too low")
    if any(target.apple and target.fit is None for target in targets):
        ultra = assumed.ultra_efficiency or assumed.efficiency
        lines.append(
            f"Apple GPUs: bytes / ({percent(assumed.efficiency)} of nominal, {percent(ultra)} on an Ultra) + kernels * "
            f"{assumed.kernel_us:.1f} us on an M1, {assumed.per_generation:.2f}x that for each later generation, "
            f"{assumed.mixture:.1f}x with experts; from published figures of {ENGINE}"
        )
        lines.append(error_line(ENGINE))
        lines.append(
            f"largest context: KV as {kv.name}; macOS gives the GPU two thirds of up to {SMALL_MAC_GB} GB, "
            f"{percent(LARGE_MAC_SHARE)} of more"
        )
    if any(target.measured and target.busy for target in targets):
        lines.append("the bandwidth was measured while other programs used the CPU: it is higher on an idle machine")
    if any(not target.apple and target.fit is None for target in targets):
        lines.append("no expected speed without measured figures; the roofline is an upper bound")
    return lines
