"""Decode speeds measured on users' machines (assets/measured.toml), as `headrace bench --report mac` writes them.

`app.bench.show.machine_report` writes the keys that the structs below read. `predict` shows a speed of exactly the same
model, chip and context next to its prediction.

Guard: tests/app/predict/test_predict.py.
"""

import tomllib
from functools import cache
from pathlib import Path

from msgspec import Struct

from headrace.app.predict.prediction import TargetMachine
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.config.typed import typed
from headrace.runtime.machine import chips
from headrace.runtime.machine.chips import without_vendor

FILE = ASSETS / "measured.toml"
_DECODE = "tg"  # tests that decode, as `headrace bench` names them


class _MeasuredRow(Struct):
    """tokens_per_second, ratio: the median, and the ends of its interval if there are any."""

    model: str
    test: str
    depth: int
    tokens_per_second: list[float]
    ratio: list[float] | None = None


class _MeasuredMachine(Struct):
    chip: str
    date: str
    versions: dict[str, str]
    speeds: list[_MeasuredRow]
    gpu_cores: int | None = None


class _MeasuredFile(Struct):
    """assets/measured.toml."""

    machine: list[_MeasuredMachine] = []


class MeasuredSpeed(Struct, frozen=True):
    """One measured decode speed, the median of its run."""

    chip: str
    gpu_cores: int | None  # None without a GPU
    model: str
    depth: int  # tokens in the cache
    tokens_per_second: float
    ratio: float | None  # over mlx-lm's speed in the same run; None if it was not measured
    date: str  # ISO 8601
    headrace: str  # version

    @property
    def bandwidth(self) -> float | None:
        """The vendor's memory bandwidth of this variant of the chip, in bytes per second."""
        row = chips.find(self.chip, self.gpu_cores)
        return row.bandwidth if row is not None else None


def load(path: Path = FILE) -> tuple[MeasuredSpeed, ...]:
    """Return the decode speeds of a file, oldest first. Raises ValueError on a malformed one."""
    with path.open("rb") as file:
        machines = typed(_MeasuredFile, tomllib.load(file)).machine
    speeds = [_speed(machine, row) for machine in machines for row in machine.speeds]
    return tuple(sorted((speed for speed in speeds if speed), key=lambda speed: speed.date))


@cache
def measured() -> tuple[MeasuredSpeed, ...]:
    """Return the decode speeds that came with headrace."""
    return load()


def measured_speed(model: str, target: TargetMachine, context: int) -> MeasuredSpeed | None:
    """Return the newest speed of the model on the target's chip with exactly so many tokens in the cache."""
    fitting = (
        speed for speed in measured() if (speed.model, speed.depth) == (model, context) and _same_chip(speed, target)
    )
    return max(fitting, key=lambda speed: speed.date, default=None)


def _same_chip(speed: MeasuredSpeed, target: TargetMachine) -> bool:
    """Return whether the target is a variant of the speed's chip with the same bandwidth."""
    name = without_vendor(target.chip or target.name.partition(" (")[0])
    return without_vendor(speed.chip) == name and speed.bandwidth == target.bandwidth


def _speed(machine: _MeasuredMachine, row: _MeasuredRow) -> MeasuredSpeed | None:
    """Return the speed of a row; None for prefill, batches and workloads."""
    if not (row.test.startswith(_DECODE) and row.test.removeprefix(_DECODE).isdigit()):
        return None
    median, *_interval = row.tokens_per_second
    ratio = None
    if row.ratio is not None:
        ratio, *_interval = row.ratio
    return MeasuredSpeed(
        chip=machine.chip,
        gpu_cores=machine.gpu_cores,
        model=row.model,
        depth=row.depth,
        tokens_per_second=median,
        ratio=ratio,
        date=machine.date,
        headrace=machine.versions["headrace"],
    )
