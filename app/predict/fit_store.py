"""Step-cost fits of recent benchmarks on this machine, for predictions; one file in the cache folder.

- Predictions use the fastest recent fit (`best_fit`): other load only slows steps down.
- A fit from a busy or throttled machine counts only if there is no other.
- Fits that cannot be right are refused (`refusal`).
- Fits are stored per machine and kernels.

Guard: tests/app/predict/test_fit_store.py.
"""

import math
from contextlib import suppress
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import asdict

from headrace.app.predict.step_cost_fit import StepCostFit
from headrace.runtime import ops
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.config.typed import typed
from headrace.runtime.machine.hardware import Machine
from headrace.runtime.machine.peaks import cached_peak
from headrace.runtime.metrics.units import percent

MIN_POINTS = 3  # any line fits two points
MAX_DEVIATION = 0.05  # of a point from the line, and of rounds from their mean, as a fraction
MAX_FITS = 8  # per machine and kernels: outlasts a busy hour, follows changes of the machine


class MeasuredFit(Struct, frozen=True):
    """A fit and its run."""

    fixed_s: float  # of a step that moves no bytes
    bytes_per_second: float  # of the bytes of a step
    step_bytes: float  # mean of the tests
    created: str  # UTC, ISO 8601
    command: str
    quiet: bool  # no other program slowed the run
    points: int = 0  # number of tests

    def seconds(self, nbytes: float, share: float = 1.0) -> float:
        """Return the expected time of a step that moves `nbytes`. share: part of the layers that it runs."""
        return self.fixed_s * share + nbytes / self.bytes_per_second

    @property
    def usable(self) -> bool:
        """Return whether the fit is possible: finite, not negative, enough points."""
        sizes = (self.bytes_per_second, self.step_bytes)
        return self.points >= MIN_POINTS and 0 <= self.fixed_s < math.inf and all(0 < size < math.inf for size in sizes)


def refusal(step_cost: StepCostFit, peak_gb_s: float | None, max_half_width: float | None) -> str | None:
    """Return the reason to refuse a benchmark's fit; None for a good one.

    max_half_width: largest half width of a test's interval over its mean; None after a single round.
    """
    num_points = len(step_cost.points)
    if num_points < MIN_POINTS:
        return f"{num_points} points where {MIN_POINTS} are needed; measure more depths, such as -d 0,1024,4096"
    rate = step_cost.effective_bandwidth_gb_s
    if peak_gb_s is not None and rate > peak_gb_s:
        return f"its {rate:.1f} GB/s exceed the measured peak of {peak_gb_s:.1f}"
    if step_cost.largest_residual > MAX_DEVIATION:
        return f"a point is {percent(step_cost.largest_residual)} off the line"
    if max_half_width is None:
        return "one round shows no spread; measure more, such as -r 3"
    if max_half_width > MAX_DEVIATION:
        return f"its rounds disagree by {percent(max_half_width)}"
    return None


def store_fit(
    host: Machine, step_cost: StepCostFit, *, max_half_width: float | None, created: str, command: str, quiet: bool
) -> str | None:
    """Store a benchmark's fit or return the reason for refusal. A cache that cannot be written is no error.

    max_half_width: largest half width of a test's interval over its mean; None after a single round.
    quiet: nothing is known to have slowed the machine during the run.
    """
    peak = cached_peak(host)
    reason = refusal(step_cost, peak.gb_s if peak else None, max_half_width)
    if reason is not None:
        return reason
    fit = MeasuredFit(
        fixed_s=step_cost.fixed_ms / 1e3,
        bytes_per_second=step_cost.effective_bandwidth_gb_s * 1e9,
        step_bytes=sum(point.bytes for point in step_cost.points) / len(step_cost.points),
        created=created,
        command=command,
        quiet=quiet,
        points=len(step_cost.points),
    )
    if not fit.usable:
        return "its figures are impossible"
    key = _key(host)
    stored = read_cache(_path())
    recent = [asdict(each) for each in (*_fits(stored.get(key)), fit)][-MAX_FITS:]
    write_cache(_path(), {**stored, key: recent})
    return None


def best_fit(host: Machine) -> MeasuredFit | None:
    """Return the best fit for this machine and the active kernels, if any."""
    peak = cached_peak(host)
    fits = _fits(read_cache(_path()).get(_key(host)))
    fits = [fit for fit in fits if peak is None or fit.bytes_per_second <= peak.bytes_per_second]
    candidates = [fit for fit in fits if fit.quiet] or fits
    if not candidates:
        return None
    usual = median(fit.step_bytes for fit in candidates)
    return min(candidates, key=lambda fit: fit.seconds(usual))


def _fits(stored: object) -> list[MeasuredFit]:
    """Return the usable fits of a file with arbitrary content."""
    fits = []
    for entry in stored if isinstance(stored, list) else []:
        with suppress(ValueError):
            fit = typed(MeasuredFit, entry)
            if fit.usable:
                fits.append(fit)
    return fits


def _path() -> Path:
    return cache_dir() / "step_cost.json"


def _key(host: Machine) -> str:
    return f"{host.device_name} / {host.backend} / {host.usable_cores} cores / {ops.describe().get('kernels')}"
