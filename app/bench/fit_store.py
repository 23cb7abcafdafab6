"""The last step-cost fit of this machine, for predictions: one small file in the cache folder, keyed by machine."""

import json
import math
import os
from pathlib import Path

from app.bench.fit import StepCostFit
from runtime import ops
from runtime.hardware import Machine
from runtime.paths import cache_dir


def remember(host: Machine, fit: StepCostFit) -> None:
    """Keep a fit that makes sense. A cache that cannot be written is no error."""
    if fit.fixed_s < 0:
        return
    stored = _read() | {_key(host): {"fixed_s": fit.fixed_s, "bytes_per_second": fit.bytes_per_second}}
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(stored, indent=2) + "\n")
        partial.replace(path)
    except OSError:
        return


def remembered(host: Machine) -> StepCostFit | None:
    """The fit measured here with the kernels that are active now, if there is one."""
    entry = _read().get(_key(host))
    try:
        fit = StepCostFit(float(entry["fixed_s"]), float(entry["bytes_per_second"]), ())  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None
    return (
        fit if math.isfinite(fit.fixed_s) and math.isfinite(fit.bytes_per_second) and fit.bytes_per_second > 0 else None
    )


def _path() -> Path:
    return cache_dir() / "step_cost.json"


def _key(host: Machine) -> str:
    return f"{host.device_name} / {host.backend} / {host.usable_cores} cores / {ops.describe().get('kernels')}"


def _read() -> dict[str, dict[str, float]]:
    try:
        stored = json.loads(_path().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}
