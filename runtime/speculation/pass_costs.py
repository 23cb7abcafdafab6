"""Measured costs of passes with draft tokens, and acceptance rates of a model's own head, kept between processes.

The key is machine, MLX, kernels, threads, and the model's step: its bytes, FLOPs and K/V bytes. Entries older than
RECENT_DAYS are dropped, the file is bounded, and a broken file reads as empty. A stored cost may be stale, so it counts
for a few passes at most (`runtime.speculation.controller`).

    {"costs": {KEY: {"measured_at": TIME, "passes": [[sequences, draft tokens, size class, r, passes], ...],
                     "mtp": [rate, ...]}}}

`Drafting` loads and saves; without the file it measures from the start. Rows of another form are ignored (`_read`).

Guard: tests/runtime/speculation/test_pass_costs.py.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.peaks import RECENT_DAYS, TIME
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.speculation.controller import Costs

MAX_MODELS = 32  # the newest, of all machines
_MAX_PASSES = 512  # per model


class PassCostStore:
    """Stored pass costs of one model on this machine. cost: of its step."""

    def __init__(self, cost: StepCost) -> None:
        host = machine()
        kernels = ops.describe()["kernels"]
        version = mx.__version__  # type: ignore[attr-defined]  # missing in MLX's stubs
        self._key = (
            f"{host.device_name} / {host.backend} / mlx {version} / {kernels} / {ops.native.status().threads} threads"
            f" / {cost.weight_bytes} bytes / {cost.weight_flops} flops / {cost.kv_bytes_per_token} bytes a token"
        )

    def load(self) -> Costs:
        """Return the stored costs; empty if there are none."""
        entry = _stored().get(self._key, {})
        return _read(entry.get("passes", []))

    def load_rates(self) -> list[float]:
        """Return the stored acceptance rates of a multi-token prediction head; empty if there are none."""
        rates = _stored().get(self._key, {}).get("mtp")
        if not isinstance(rates, list) or not all(isinstance(rate, float | int) and 0 <= rate <= 1 for rate in rates):
            return []
        return [float(rate) for rate in rates]

    def save(self, costs: Costs, rates: Sequence[float] = ()) -> None:
        """Add costs to the stored ones; new ones replace those of the same passes. rates: see `load_rates`."""
        merged = {**self.load(), **costs}
        passes = [[*at, round(ratio, 4), count] for at, (ratio, count) in sorted(merged.items())][:_MAX_PASSES]
        entry: dict[str, object] = {"measured_at": datetime.now(UTC).strftime(TIME), "passes": passes}
        if rates:
            entry["mtp"] = [round(rate, 4) for rate in rates]
        others = {key: costs_s for key, costs_s in _stored().items() if key != self._key}
        newest = sorted(others, key=lambda key: others[key]["measured_at"])[-(MAX_MODELS - 1) :]
        write_cache(_file(), {"costs": {**{key: others[key] for key in newest}, self._key: entry}})


def _stored() -> dict[str, dict[str, Any]]:
    """Return all entries that are sound and recent."""
    stored = read_cache(_file()).get("costs")
    if not isinstance(stored, Mapping):
        return {}
    oldest = (datetime.now(UTC) - timedelta(days=RECENT_DAYS)).strftime(TIME)
    return {
        key: entry
        for key, entry in stored.items()
        if isinstance(entry, dict)
        and isinstance(entry.get("passes"), list)
        and isinstance(entry.get("measured_at"), str)
        and entry["measured_at"] >= oldest
    }


def _read(rows: list[object]) -> Costs:
    """Return the costs in stored rows, without those that are malformed or impossible."""
    costs: dict[tuple[int, int, int], tuple[float, int]] = {}
    for row in rows[:_MAX_PASSES]:
        match row:
            case [int(sequences), int(count), int(size), float() | int() as ratio, int(passes)]:
                # Size classes count from 0, all else from 1. No pass with draft tokens is cheaper than one without.
                if min(sequences, count, size + 1, passes) > 0 and math.isfinite(ratio) and ratio >= 1:
                    costs[sequences, count, size] = float(ratio), passes
    return costs


def _file() -> Path:
    return cache_dir() / "speculation.json"
