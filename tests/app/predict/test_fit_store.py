"""Choice among stored step-cost fits, and damaged files of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.predict.fit_store import MAX_FITS, best_fit, refusal, store_fit
from headrace.app.predict.step_cost_fit import FittedPoint, StepCostFit
from headrace.runtime.machine import peaks
from headrace.runtime.machine.hardware import machine

BYTES = 100e6


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


def measured(fixed_ms: float, gb_s: float, name: str, *, quiet: bool = True) -> None:
    """A benchmark called `name` came to this fit."""
    keep(step_cost(fixed_ms, gb_s), name, quiet=quiet)


def keep(fit: StepCostFit, name: str, *, quiet: bool) -> str | None:
    return store_fit(machine(), fit, max_half_width=0.01, created="2026-01-02T03:04:05Z", command=name, quiet=quiet)


def step_cost(fixed_ms: float, gb_s: float) -> StepCostFit:
    return StepCostFit(
        fixed_ms=fixed_ms,
        effective_bandwidth_gb_s=gb_s,
        largest_residual=0.01,
        points=[FittedPoint("", size * BYTES, 1.0, 0.0) for size in (1, 1.5, 2)],
        notes=[],
    )


def trusted() -> str | None:
    fit = best_fit(machine())
    return fit.command if fit else None


def test_without_measurements_there_is_no_fit() -> None:
    assert trusted() is None


def test_a_run_under_load_does_not_replace_a_faster_one() -> None:
    measured(0.5, 50, "quiet")
    measured(0.6, 20, "under load that nobody noticed")
    measured(0.1, 80, "fast, but the machine was busy", quiet=False)
    assert trusted() == "quiet"


def test_a_fit_under_load_is_used_until_a_quiet_one_exists() -> None:
    measured(0.5, 20, "slow", quiet=False)
    measured(0.5, 30, "faster", quiet=False)
    assert trusted() == "faster"
    measured(0.5, 10, "quiet")
    assert trusted() == "quiet"


def test_fits_are_compared_at_the_bytes_that_were_measured() -> None:
    measured(0.1, 40, "little overhead")  # 3.85 ms at 150 MB
    measured(1.5, 60, "much bandwidth")  # 4.0 ms
    assert trusted() == "little overhead"


def test_the_oldest_fits_are_dropped() -> None:
    measured(0.1, 90, "before the memory was swapped")
    for number in range(MAX_FITS):
        measured(0.5, 40, f"run {number}")
    assert trusted() == "run 0"


@pytest.mark.parametrize(("fixed_ms", "gb_s"), [(-0.1, 50), (float("nan"), 50), (0.1, float("inf")), (0.1, 0)])
def test_impossible_fits_are_not_stored(fixed_ms: float, gb_s: float, home: Path) -> None:
    measured(fixed_ms, gb_s, "nonsense")
    assert trusted() is None
    assert not (home / "cache" / "step_cost.json").exists()


@pytest.mark.parametrize(
    "stored",
    [
        5,
        {"fixed_s": 1e-3, "bytes_per_second": 5e10},  # as an earlier version kept it
        [None],
        [[]],
        [{"fixed_s": 1}],
        [{"fixed_s": "1", "bytes_per_second": 1, "step_bytes": 1, "created": "", "command": "", "quiet": True}],
        [{"fixed_s": 1, "bytes_per_second": 1, "step_bytes": 1, "created": 5, "command": "", "quiet": True}],
    ],
)
def test_a_damaged_file_reads_as_no_fit_and_is_replaced(stored: Any, home: Path) -> None:
    measured(0.5, 50, "first")
    file = home / "cache" / "step_cost.json"
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: stored}))
    assert trusted() is None
    measured(0.5, 50, "second")
    assert trusted() == "second"


def test_a_fit_faster_than_memory_is_refused_and_one_kept_before_is_not_trusted() -> None:
    measured(0.5, 78.9, "before anybody knew")
    assert trusted() == "before anybody knew"
    peaks.store(peaks.summarise([13.6e9], pass_bytes=1, method="memcmp", source="bench"))
    assert trusted() is None
    reason = keep(step_cost(17.7, 78.9), "a busy machine", quiet=False)
    assert reason is not None
    assert "78.9 GB/s" in reason
    assert "13.6" in reason
    measured(0.5, 13, "sound")
    assert trusted() == "sound"


def test_too_few_depths_and_noisy_rounds_are_refused() -> None:
    good = step_cost(0.5, 10)
    few = replace(good, points=good.points[:2])
    bent = replace(good, largest_residual=0.2)
    assert "3 are needed" in str(refusal(few, None, 0.01))
    assert "off the line" in str(refusal(bent, None, 0.01))
    assert "disagree" in str(refusal(good, None, 0.2))
    assert "one round" in str(refusal(good, None, None))
    assert refusal(good, 12.0, 0.01) is None


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_file_that_is_no_json_is_replaced(content: str, home: Path) -> None:
    (home / "cache").mkdir()
    (home / "cache" / "step_cost.json").write_text(content)
    assert trusted() is None
    measured(0.5, 50, "new")
    assert trusted() == "new"
