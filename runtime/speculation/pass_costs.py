"""What passes with guesses cost, remembered between processes, so that the first answer of the next one knows it.

By what decides it: the machine, MLX, the kernels and their threads, and of the model the bytes and multiply-adds of a
step and the bytes of its K/V. Nothing is measured for it. As with the memory's speed (`runtime.machine.peaks`), what is
older than RECENT_DAYS is gone, the file is small and bounded, and what cannot be read or written was never measured.
What is remembered may be stale: it weighs no more than a few passes (`runtime.speculation.controller`).
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.config.cache_file import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.peaks import RECENT_DAYS
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.speculation.controller import Costs

MODELS = 32  # the newest ones of all machines that are remembered
_ENTRIES = 256  # of one of them
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class KeptCosts:
    """Those of one model on this machine. cost: of its step."""

    def __init__(self, cost: StepCost) -> None:
        host, kernels = machine(), ops.describe()["kernels"]
        version = mx.__version__  # type: ignore[attr-defined]  # missing in MLX's stubs
        self._key = (
            f"{host.device_name} / {host.backend} / mlx {version} / {kernels} / {ops.native.status().threads} threads"
            f" / {cost.weight_bytes} bytes / {cost.weight_flops} flops / {cost.kv_bytes_per_token} bytes a token"
        )

    def recall(self) -> Costs:
        """What was kept last; empty where nothing sound was."""
        entry = _stored().get(self._key)
        return _read(entry["passes"]) if entry else {}

    def keep(self, costs: Costs) -> None:
        """In place of what was kept of the same passes."""
        merged = {**self.recall(), **costs}
        passes = [[*at, round(ratio, 4), seen] for at, (ratio, seen) in sorted(merged.items())][:_ENTRIES]
        entry = {"measured_at": datetime.now(UTC).strftime(_TIME), "passes": passes}
        others = {key: kept for key, kept in _stored().items() if key != self._key}
        newest = sorted(others, key=lambda key: others[key]["measured_at"])[-(MODELS - 1) :]
        write_cache(_file(), {"costs": {**{key: others[key] for key in newest}, self._key: entry}})


def _stored() -> dict[str, dict[str, Any]]:
    """All entries that are whole and recent."""
    stored = read_cache(_file()).get("costs")
    oldest = (datetime.now(UTC) - timedelta(days=RECENT_DAYS)).strftime(_TIME)
    return {
        key: entry
        for key, entry in (stored.items() if isinstance(stored, Mapping) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("passes"), list)
        and isinstance(entry.get("measured_at"), str)
        and entry["measured_at"] >= oldest
    }


def _read(passes: list[Any]) -> Costs:
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for row in passes[:_ENTRIES]:
        match row:
            case [int(sequences), int(guesses), float() | int() as ratio, int(seen)]:
                if min(sequences, guesses, seen) > 0 and math.isfinite(ratio) and ratio >= 1:
                    found[sequences, guesses] = float(ratio), seen
    return found


def _file() -> Path:
    return cache_dir() / "speculation.json"
