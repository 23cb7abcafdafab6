"""Published decode speeds (assets/published.toml), and five constants per engine fitted to them.

Errors are those of predictions for sources that the constants were not fitted to: each source was left out in turn. A
new figure is a row of a series in the file; the constants in its `engines` are then fitted anew (the file says how).

Guard: tests/app/predict/test_predict.py.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache

from msgspec import Struct, field

from headrace.models.cost.shape_sources import shape_of_config
from headrace.models.cost.step_shape import StepShape
from headrace.models.registry.catalog import find
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.config.typed import typed
from headrace.runtime.machine import chips
from headrace.runtime.metrics.cost import quantized_bytes
from headrace.runtime.metrics.units import percent

ENGINE = "mlx-lm"
"""Engine whose published figures apply to Macs that were not measured."""
_SMALL = 1e9  # bytes of a step
_GENERATION = re.compile(r"\bM([1-9][0-9]?)\b")  # the 4 of "M4 Max"


class Assumptions(Struct, frozen=True):
    """An engine on Apple GPUs: t = kernels * time of a kernel + bytes / (efficiency * nominal bandwidth).

    kernel_us: of an M1, for kernels of any size; each later generation takes `per_generation` times as long.
    kernels: those of a layer, by a pattern of the family, the first that fits.
    ultra_efficiency: of chips of two dies; None: as of the others.
    mixture: the time of a layer's kernels with experts over a dense one's.
    held_out: fields of `HeldOut` by class.
    """

    efficiency: float
    kernel_us: float
    kernels: tuple[tuple[str, int], ...] = (("", 1),)
    ultra_efficiency: float | None = None
    per_generation: float = 1.0
    mixture: float = 1.0
    held_out: Mapping[str, tuple[int, float, float, float, float]] = field(default_factory=dict)

    @property
    def kernel_s(self) -> float:
        """Seconds of a kernel of an M1."""
        return self.kernel_us * 1e-6

    def seconds(
        self, nbytes: float, layers: int, family: str, chip: str, bandwidth: float, *, mixture: bool = False
    ) -> float:
        """Return a step's time.

        nbytes: that the step moves.
        layers: number of them.
        family: decides the kernels of a layer.
        chip: its name; like an M1 if unknown.
        bandwidth: nominal, in bytes per second.
        mixture: the model has experts.
        """
        efficiency = self.efficiency
        if self.ultra_efficiency and "Ultra" in chip:
            efficiency = self.ultra_efficiency
        kernel_s = self.kernel_s
        if match := _GENERATION.search(chip):
            kernel_s *= self.per_generation ** (int(match[1]) - 1)
        kernels: float = layers * self.kernels_of(family)
        if mixture:
            kernels *= self.mixture
        return kernels * kernel_s + nbytes / (efficiency * bandwidth)

    def kernels_of(self, family: str) -> int:
        """Return the kernels of a layer."""
        return next(count for pattern, count in self.kernels if re.match(pattern, family))


class _Series(Struct):
    """Figures of one source, of one chip in all rows or of one model."""

    engine: str
    source: str
    depth: int
    rows: list[list[object]]
    chip: tuple[str, int] | None = None
    model: str = ""
    formats: list[str] = []


class _PublishedFile(Struct):
    """assets/published.toml. models: configurations of those that the catalog does not have."""

    engines: dict[str, Assumptions]
    models: dict[str, dict[str, object]]
    series: list[_Series]


class PublishedPoint(Struct, frozen=True):
    """One published decode speed, with the inputs of its prediction.

    stored_as: format of the weights, as the file writes it: "4/64", "Q4_K_M", or "EXPERTS+OTHERS".
    nbytes: that a step moves.
    bandwidth: nominal, in bytes per second.
    mixture: the model has experts.
    """

    engine: str
    model: str
    stored_as: str
    chip: str
    gpu_cores: int | None
    tokens_per_second: float
    nbytes: float
    layers: int
    family: str
    bandwidth: float
    source: str
    mixture: bool

    @property
    def kind(self) -> str:
        """`mixture`, `small` (steps below 1 GB) or `dense`: the classes in which errors are reported."""
        if self.mixture:
            return "mixture"
        if self.nbytes < _SMALL:
            return "small"
        return "dense"


def assumptions(engine: str) -> Assumptions:
    """Return the constants of `mlx-lm` or `llama.cpp`."""
    return _file().engines[engine]


def points() -> Sequence[PublishedPoint]:
    """Return every published figure."""
    return [point for series in _file().series for row in series.rows for point in _points(series, row)]


def error(point: PublishedPoint, assumed: Assumptions) -> float:
    """Return predicted over published, less one."""
    return predicted(point, assumed) / point.tokens_per_second - 1


def predicted(point: PublishedPoint, assumed: Assumptions) -> float:
    """Return the predicted speed of a published one, in tok/s."""
    key = point.layers, point.family, point.chip, point.bandwidth
    return 1 / assumed.seconds(point.nbytes, *key, mixture=point.mixture)


class HeldOut(Struct, frozen=True):
    """Errors of predictions for sources left out of the fit, as parts of the published speed.

    figures: number of published speeds.
    median: of the errors without their signs.
    bias: median of the errors.
    lowest, highest: their range.
    """

    figures: int
    median: float
    bias: float
    lowest: float
    highest: float


def held_out(engine: str) -> dict[str, HeldOut]:
    """Return an engine's errors by class, and of `all`."""
    return {kind: HeldOut(*row) for kind, row in assumptions(engine).held_out.items()}


def error_line(engine: str) -> str:
    """Return the errors of the predictions for an engine's published figures, by class."""
    names = {"dense": "dense", "small": "below 1 GB a step", "mixture": "mixtures", "all": "all"}
    parts = []
    for kind, errors in held_out(engine).items():
        lowest = percent(errors.lowest, is_signed=True)
        highest = percent(errors.highest, is_signed=True)
        parts.append(f"{names[kind]} {percent(errors.median, 1)} ({errors.figures}, {lowest} to {highest})")
    return f"median error on published speeds of sources that were left out of the fit: {', '.join(parts)}"


def _points(series: _Series, row: list[object]) -> list[PublishedPoint]:
    """Return the figures of a row, see assets/published.toml."""
    if series.chip is not None:
        model, stored_as, speed = typed(tuple[str, str, float], row)
        return [_point(series, *series.chip, model, stored_as, speed)]
    name, cores = typed(tuple[str, int], row[:2])
    speeds = typed(list[float], row[2:])
    known = [(form, speed) for form, speed in zip(series.formats, speeds, strict=True) if speed]
    return [_point(series, name, cores, series.model, form, speed) for form, speed in known]


def _point(series: _Series, name: str, cores: int, model: str, stored_as: str, speed: float) -> PublishedPoint:
    """Return a figure of a series.

    name, cores: of the chip; 0 cores if the source does not tell them.
    model, stored_as: as the file writes them.
    speed: tokens per second.
    """
    chip = chips.find(name, cores or None)
    assert chip is not None, name
    shape = _shape(model)
    return PublishedPoint(
        engine=series.engine,
        model=model,
        stored_as=stored_as,
        chip=name,
        gpu_cores=cores or None,
        tokens_per_second=speed,
        nbytes=_step_bytes(shape, stored_as, series.depth),
        layers=shape.layers,
        family=shape.family,
        bandwidth=chip.bandwidth,
        source=series.source,
        mixture=shape.mixture,
    )


@cache
def _shape(model: str) -> StepShape:
    """Return the shape of a model of the file, or else of the catalog."""
    config = _file().models.get(model)
    if config is None:
        return find(model).step_shape
    return shape_of_config(config)


def _step_bytes(shape: StepShape, stored_as: str, depth: int) -> float:
    """Return the bytes of a step with the weights in another engine's format."""
    cost = shape.cost
    weights = sum(_weight_bytes(shape, stored_as, experts=experts) for experts in (False, True))
    return cost.step_bytes(depth) - cost.weight_bytes + shape.vector_bytes + weights


def _weight_bytes(shape: StepShape, stored_as: str, *, experts: bool) -> float:
    """Return the bytes that a step reads of the experts or of the others. stored_as may be "EXPERTS+OTHERS"."""
    expert_format, _, other_format = stored_as.partition("+")
    matrices = [matrix for matrix in shape.matrices if (matrix.share < 1) is experts]
    weights_read = round(sum(matrix.count * matrix.share * matrix.reads * matrix.weights for matrix in matrices))
    if other_format and not experts:
        return _stored_bytes(weights_read, other_format)
    return _stored_bytes(weights_read, expert_format)


def _stored_bytes(weights: int, stored_as: str) -> float:
    if "/" in stored_as:
        bits, group = stored_as.split("/")
        return quantized_bytes(weights, int(bits), int(group))
    from headrace.models.gguf.header import BLOCKS

    block, size = BLOCKS[stored_as.upper()]
    return weights * size / block


@cache
def _file() -> _PublishedFile:
    with (ASSETS / "published.toml").open("rb") as file:
        return typed(_PublishedFile, tomllib.load(file))
