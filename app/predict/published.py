"""Published decode speeds (assets/published.toml), and two constants per engine fitted to them."""

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
    """An engine on Apple GPUs: t = layers * layer_s + bytes / (efficiency * nominal bandwidth)."""

    engine: str
    efficiency: float
    layer_s: float

    def seconds(self, nbytes: float, layers: int, bandwidth: float) -> float:
        """Return a step's time; `bandwidth` is nominal, in bytes per second."""
        return layers * self.layer_s + nbytes / (self.efficiency * bandwidth)


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


def assumptions(engine: str) -> Assumptions:
    """Return the constants of `mlx-lm` or `llama.cpp`."""
    row = _file()["engines"][engine]
    return Assumptions(engine, row["efficiency"], row["layer_us"] * 1e-6)


def points() -> Sequence[PublishedPoint]:
    """Return every published figure."""
    return [point for series in _file()["series"] for row in series["rows"] for point in _points(series, row)]


def error(point: PublishedPoint, assumed: Assumptions) -> float:
    """Return predicted over published, less one."""
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
    """Return the bytes of a step with the weights in another engine's format."""
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
