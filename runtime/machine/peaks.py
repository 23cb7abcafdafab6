"""Stored bandwidth measurements of this machine, and the peak that utilisation is measured against.

Calibrations, benchmarks and idle chats store measurements with date and circumstances. The peak is the fastest of the
last RECENT_DAYS, since other load only slows memory down. Faster decode corrects it. The file is bounded; a broken one
reads as empty.

    {"peaks": {KEY: [Peak, ...]}}      KEY: machine, backend, cores, MLX, _FORMAT

`bandwidth.py` measures. Another field of `Peak` needs a default, as older files are read by `typed`; another way to
measure needs another `_FORMAT`. tests/runtime/machine/test_peaks.py guards this.
"""

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import asdict

from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.config.typed import as_list, as_mapping, typed
from headrace.runtime.machine.hardware import Machine, machine, power_state

RECENT_DAYS = 30  # older ones may be of other memory or settings
KEPT = 16  # measurements per machine
STEP_BYTES = 64 << 20  # least bytes of a step that corrects the peak: smaller ones may fit caches
STEPS = 16  # least intervals: a token read late makes the next one look early
_FORMAT = 3  # of the measurement, raised with every change of a reader: others' rates are not compared with its own
_VERSION = f" / {_FORMAT}"
TIME = "%Y-%m-%dT%H:%M:%SZ"  # in files; sorted as texts, such times are in order


class Peak(Struct, frozen=True):
    """A measured bandwidth. Rates in bytes per second over `passes` passes of `pass_bytes` bytes each."""

    bytes_per_second: float
    """Upper quartile; the basis of utilisation."""
    median: float
    best: float
    passes: int
    pass_bytes: int
    method: str
    measured_at: str
    """UTC, ISO 8601."""
    source: str = "calibration"
    """`calibration`, `run`, `bench`, `chat`, or `decode` for steps faster than the peak."""
    load: float | None = None
    """Load average, this process included."""
    busy: bool = False
    """Other programs kept the CPUs busy, so memory is faster than this."""

    @property
    def gb_s(self) -> float:
        return self.bytes_per_second / 1e9

    @property
    def valid(self) -> bool:
        """True if rates are plausible; a file may have any."""
        return all(math.isfinite(rate) and rate > 0 for rate in (self.bytes_per_second, self.median, self.best))


def summarise(rates: Sequence[float], *, pass_bytes: int, method: str, source: str, busy: bool = False) -> Peak:
    """Return passes made just now as one measurement.

    rates: bytes per second of each pass, at least one.
    pass_bytes: bytes that a pass reads.
    method, source, busy: see `Peak`.

    The best pass is no ceiling: on virtual machines single passes can reach nearly twice the sustained rate.
    """
    ordered = sorted(rates)
    return Peak(
        bytes_per_second=ordered[len(ordered) * 3 // 4],
        median=median(ordered),
        best=ordered[-1],
        passes=len(ordered),
        pass_bytes=pass_bytes,
        method=method,
        measured_at=datetime.now(UTC).strftime(TIME),
        source=source,
        load=round(os.getloadavg()[0], 2),
        busy=busy,
    )


def age_s(peak: Peak) -> float:
    """Return the seconds since a measurement; infinite for a date that is none."""
    try:
        return (datetime.now(UTC) - datetime.strptime(peak.measured_at, TIME).replace(tzinfo=UTC)).total_seconds()
    except ValueError:
        return math.inf


def cached_peak(host: Machine | None = None) -> Peak | None:
    """Return the peak of this machine; None if never measured."""
    peaks = measurements(host)
    return max(_recent(peaks) or peaks[-1:], key=lambda peak: peak.bytes_per_second, default=None)


def measurements(host: Machine | None = None) -> list[Peak]:
    """Return the measurements of this machine with this MLX, oldest first."""
    stored = as_mapping(read_cache(_cache_file()).get("peaks"))
    peaks = map(_read, as_list(stored.get(_key(host or machine()))))
    return [peak for peak in peaks if peak is not None]


def store(peak: Peak, host: Machine | None = None) -> None:
    """Store a measurement; the KEPT fastest recent ones stay, and always the newest.

    Measurements of a Mac in low power mode or under thermal pressure are dropped: a single one would be the peak.
    """
    host = host or machine()
    if host.backend != "metal" or not power_state().slows_memory:
        _keep(peak, host)


def _keep(peak: Peak, host: Machine) -> None:
    """Write a measurement to the file. Entries of other machines stay, unless they are of an older format."""
    older = sorted(_recent(measurements(host)), key=lambda measured: measured.bytes_per_second)[-(KEPT - 1) :]
    entries = [asdict(measured) for measured in sorted([*older, peak], key=lambda measured: measured.measured_at)]
    stored = read_cache(_cache_file()).get("peaks")
    others = {}
    if isinstance(stored, dict):
        others = {key: rows for key, rows in stored.items() if key.endswith(_VERSION)}
    write_cache(_cache_file(), {"peaks": {**others, _key(host): entries}})


def correct_peak(
    achieved_gb_s: float | None, *, step_bytes: int, steps: int, host: Machine | None = None
) -> Peak | None:
    """Store and return a new peak if `steps` decode steps of `step_bytes` were faster than it, else return None.

    steps: the first one included, which has no interval. Steps below STEP_BYTES, fewer than STEPS intervals, or rates
    above the nominal bandwidth do not count.
    """
    host = host or machine()
    known = cached_peak(host)
    if achieved_gb_s is None or known is None or achieved_gb_s <= known.gb_s or step_bytes < STEP_BYTES:
        return None
    if steps <= STEPS or (host.nominal_bandwidth and achieved_gb_s * 1e9 > host.nominal_bandwidth):
        return None
    peak = summarise([achieved_gb_s * 1e9], pass_bytes=step_bytes, method=f"{steps} decode steps", source="decode")
    _keep(peak, host)
    return peak


def _recent(peaks: Sequence[Peak]) -> list[Peak]:
    oldest = (datetime.now(UTC) - timedelta(days=RECENT_DAYS)).strftime(TIME)
    return [peak for peak in peaks if peak.measured_at >= oldest]  # as texts: `TIME` sorts by time


def _read(entry: object) -> Peak | None:
    try:
        peak = typed(Peak, entry)
    except ValueError:
        return None
    if not peak.valid:
        return None
    return peak


def _key(host: Machine) -> str:
    return f"{machine_key(host)}{_VERSION}"


def machine_key(host: Machine) -> str:
    """Return the key of measurements of this machine with this MLX."""
    import mlx.core as mx

    version = mx.__version__  # type: ignore[attr-defined]  # missing in MLX's stubs
    return f"{host.device_name} / {host.backend} / {host.usable_cores} cores / mlx {version}"


def _cache_file() -> Path:
    return cache_dir() / "bandwidth.json"
