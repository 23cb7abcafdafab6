"""The step-cost fits of this machine's recent benchmarks, for predictions: one small file in the cache folder.

Whatever else runs on a machine only ever makes a step slower, so a prediction takes the fastest of the recent fits,
and one whose run met a busy or throttled machine only where there is no other. Fits are kept by machine and kernels.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from headrace.app.predict.step_cost_fit import StepCostFit
from headrace.runtime import ops
from headrace.runtime.cache_file import read_cache, write_cache
from headrace.runtime.machine.hardware import Machine
from headrace.runtime.paths import cache_dir

KEPT = 8  # runs: enough to outlast a busy hour, few enough to follow a change of the machine


@dataclass(frozen=True, slots=True)
class MeasuredFit:
    """A fit and the run it is from. created: UTC, ISO 8601. step_bytes: what that run's steps moved on average."""

    fixed_s: float
    bytes_per_second: float
    step_bytes: float
    created: str
    command: str
    quiet: bool

    def seconds(self, nbytes: float) -> float:
        """The expected time of a step that moves `nbytes`."""
        return StepCostFit(self.fixed_s, self.bytes_per_second, ()).seconds(nbytes)

    @property
    def usable(self) -> bool:
        """Whether it can be true: no negative cost, nothing infinite."""
        sizes = (self.bytes_per_second, self.step_bytes)
        return 0 <= self.fixed_s < math.inf and all(0 < size < math.inf for size in sizes)


def remember(host: Machine, document: dict[str, Any], *, quiet: bool) -> None:
    """Keep the fit of a benchmark, if it has one that makes sense. A cache that cannot be written is no error.

    document: see docs/bench-json.md. quiet: nothing was known to slow the machine down during that run.
    """
    found = document["step_cost"]
    if found is None:
        return
    fit = MeasuredFit(
        fixed_s=found["fixed_ms"] / 1e3,
        bytes_per_second=found["effective_bandwidth_gb_s"] * 1e9,
        step_bytes=sum(point["bytes"] for point in found["points"]) / len(found["points"]),
        created=document["created"],
        command=document["command"],
        quiet=quiet,
    )
    if not fit.usable:
        return
    key, stored = _key(host), read_cache(_path())
    recent = [asdict(kept) for kept in (*_fits(stored.get(key)), fit)][-KEPT:]
    write_cache(_path(), {**stored, key: recent})


def remembered(host: Machine) -> MeasuredFit | None:
    """The fit to trust of those measured here with the kernels that are active now, if there is any."""
    kept = _fits(read_cache(_path()).get(_key(host)))
    candidates = [fit for fit in kept if fit.quiet] or kept
    if not candidates:
        return None
    usual = median(fit.step_bytes for fit in candidates)
    return min(candidates, key=lambda fit: fit.seconds(usual))


def _fits(stored: object) -> list[MeasuredFit]:
    """What of a file that anything may have happened to is a usable fit."""
    found = []
    for entry in stored if isinstance(stored, list) else []:
        try:
            fit = MeasuredFit(**entry)
            found += [fit] if fit.usable and isinstance(fit.created, str) and isinstance(fit.command, str) else []
        except TypeError:
            continue
    return found


def _path() -> Path:
    return cache_dir() / "step_cost.json"


def _key(host: Machine) -> str:
    return f"{host.device_name} / {host.backend} / {host.usable_cores} cores / {ops.describe().get('kernels')}"
