"""Published decode speeds (assets/published.toml), and three constants per engine fitted to them."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.models.cost.shape_sources import shape_of_config
from headrace.models.cost.step_shape import StepShape
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.machine import chips
from headrace.runtime.metrics.cost import quantized_bytes

_SMALL = 1e9  # bytes of a step


@dataclass(frozen=True, slots=True)
class Assumptions:
    """An engine on Apple GPUs: t = layers * layer_s + bytes / (efficiency * nominal bandwidth).

    expert_efficiency: of the bytes of experts, which are gathered; None: as of all others.
    """

    engine: str
    efficiency: float
    layer_s: float
    expert_efficiency: float | None = None

    def seconds(self, nbytes: float, layers: int, bandwidth: float, expert_bytes: float = 0.0) -> float:
        """Return a step's time. bandwidth: nominal, in bytes per second. expert_bytes: the part of `nbytes`."""
        gathered = expert_bytes / (self.expert_efficiency or self.efficiency)
        return layers * self.layer_s + ((nbytes - expert_bytes) / self.efficiency + gathered) / bandwidth


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One published decode speed, with the inputs of its prediction."""

    engine: str
    model: str
    stored_as: str
    chip: str
    gpu_cores: int | None
    tokens_per_second: float
    nbytes: float
    layers: int
    bandwidth: float
    source: str
    expert_bytes: float = 0.0

    @property
    def kind(self) -> str:
        """`mixture`, `small` (steps below 1 GB) or `dense`: the classes in which errors are reported."""
        return "mixture" if self.expert_bytes else "small" if self.nbytes < _SMALL else "dense"


def assumptions(engine: str) -> Assumptions:
    """Return the constants of `mlx-lm` or `llama.cpp`."""
    row = _file()["engines"][engine]
    return Assumptions(engine, row["efficiency"], row["layer_us"] * 1e-6, row.get("expert_efficiency"))


def points() -> Sequence[PublishedPoint]:
    """Return every published figure."""
    return [point for series in _file()["series"] for row in series["rows"] for point in _points(series, row)]


def error(point: PublishedPoint, assumed: Assumptions) -> float:
    """Return predicted over published, less one."""
    seconds = assumed.seconds(point.nbytes, point.layers, point.bandwidth, point.expert_bytes)
    return 1 / seconds / point.tokens_per_second - 1


def error_line(engine: str) -> str:
    """Return the errors of the predictions for an engine's published figures, by class."""
    assumed, parts = assumptions(engine), []
    for kind, name in (("dense", "dense"), ("small", "below 1 GB a step"), ("mixture", "mixtures")):
        errors = [error(point, assumed) for point in points() if (point.engine, point.kind) == (engine, kind)]
        if errors:
            parts.append(f"{name} {min(errors):+.0%} to {max(errors):+.0%} ({len(errors)})")
    return f"predicted over published speeds, less one: {', '.join(parts)}"


def _points(series: dict[str, Any], row: list[Any]) -> list[PublishedPoint]:
    name, cores, *speeds = row
    chip = chips.find(name, cores or None)
    assert chip is not None, name
    shape = shape_of_config(_file()["models"][series["model"]])
    return [
        PublishedPoint(
            engine=series["engine"],
            model=series["model"],
            stored_as=stored_as,
            chip=name,
            gpu_cores=cores or None,
            tokens_per_second=speed,
            nbytes=_step_bytes(shape, stored_as, series["depth"]),
            expert_bytes=_weight_bytes(shape, stored_as, experts=True),
            layers=shape.layers,
            bandwidth=chip.bandwidth,
            source=series["source"],
        )
        for stored_as, speed in zip(series["formats"], speeds, strict=True)
        if speed
    ]


def _step_bytes(shape: StepShape, stored_as: str, depth: int) -> float:
    """Return the bytes of a step with the weights in another engine's format."""
    cost = shape.cost
    weights = sum(_weight_bytes(shape, stored_as, experts=experts) for experts in (False, True))
    return cost.step_bytes(depth) - cost.weight_bytes + shape.vector_bytes + weights


def _weight_bytes(shape: StepShape, stored_as: str, *, experts: bool) -> float:
    """Return the bytes that a step reads of the experts or of the others. stored_as may be "EXPERTS+OTHERS"."""
    expert_format, _, other_format = stored_as.partition("+")
    read = sum(
        matrix.count * matrix.share * matrix.weights for matrix in shape.matrices if (matrix.share < 1) is experts
    )
    return _stored_bytes(round(read), expert_format if experts else other_format or expert_format)


def _stored_bytes(weights: int, stored_as: str) -> float:
    if "/" in stored_as:
        bits, group = stored_as.split("/")
        return quantized_bytes(weights, int(bits), int(group))
    from headrace.models.gguf.header import BLOCKS

    block, size = BLOCKS[stored_as.upper()]
    return weights * size / block


@cache
def _file() -> dict[str, Any]:
    with (ASSETS / "published.toml").open("rb") as file:
        return tomllib.load(file)
