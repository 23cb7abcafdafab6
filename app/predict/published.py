"""What others measured (assets/published.toml), and the two constants per engine that predictions take from it."""

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


@dataclass(frozen=True, slots=True)
class Assumptions:
    """t = layers * layer_s + bytes / (efficiency * nominal bandwidth), as one engine does it on Apple GPUs."""

    engine: str
    efficiency: float
    layer_s: float

    def seconds(self, nbytes: float, layers: int, bandwidth: float) -> float:
        """A step's time; `bandwidth` is nominal, in bytes per second."""
        return layers * self.layer_s + nbytes / (self.efficiency * bandwidth)


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One published decode speed, with what a prediction of it needs."""

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


def assumptions(engine: str) -> Assumptions:
    """The constants for `engine` (`mlx-lm` or `llama.cpp`)."""
    row = _file()["engines"][engine]
    return Assumptions(engine, row["efficiency"], row["layer_us"] * 1e-6)


def points() -> Sequence[PublishedPoint]:
    """Every published figure."""
    return [point for series in _file()["series"] for row in series["rows"] for point in _points(series, row)]


def error(point: PublishedPoint, assumed: Assumptions) -> float:
    """Predicted over published, less one."""
    return 1 / assumed.seconds(point.nbytes, point.layers, point.bandwidth) / point.tokens_per_second - 1


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
            layers=shape.layers,
            bandwidth=chip.bandwidth,
            source=series["source"],
        )
        for stored_as, speed in zip(series["formats"], speeds, strict=True)
        if speed
    ]


def _step_bytes(shape: StepShape, stored_as: str, depth: int) -> float:
    """Bytes of a step with the weights in another engine's format."""
    cost = shape.cost
    weights = sum(matrix.count * matrix.weights for matrix in shape.matrices)
    return cost.step_bytes(depth) - cost.weight_bytes + shape.vector_bytes + _stored_bytes(weights, stored_as)


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
