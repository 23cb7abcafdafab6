"""Phrases that the views of a run share: tests' names, intervals, energy, parts of a step, means for the sentence.

A figure that two views show is written here, so that it reads the same in both.

Guard: tests/app/bench/test_views.py.
"""

from collections.abc import Callable

from rich.text import Text

from headrace.app.answer.sentence import StepFigures, other_cores
from headrace.app.bench.measure.records import Interval, Named, Profile, Result, RunDocument, Speed
from headrace.runtime.metrics.units import decimals, format_joules, percent

_BAR = 24  # cells of the longest bar, a whole step
_BARS_FROM = 76  # columns of a terminal that has room for bars
CLOSURE = 0.10  # largest gap between the parts' sum and the step that counts as explained


def interval(figure: Interval, form: Callable[[float], str], between: str = " to ") -> str:
    """Format a figure's interval; empty for a single round, which has none."""
    if figure.low is None or figure.high is None:
        return ""
    return f"{form(figure.low)}{between}{form(figure.high)}"


def spread(speed: Speed) -> float | None:
    """Return the standard deviation; None for a single round, which has none."""
    return None if speed.low is None else speed.sd


def above_one(ratio: Interval) -> bool:
    """Return whether a ratio's whole interval is above 1."""
    return ratio.low is not None and ratio.low > 1


def below_one(ratio: Interval) -> bool:
    """Return whether a ratio's whole interval is below 1."""
    return ratio.high is not None and ratio.high < 1


def bracketed(figure: Interval, form: Callable[[float], str] = decimals) -> str:
    """Format a figure's interval to stand after it: ` (1.25 to 1.36)`."""
    text = interval(figure, form)
    return f" ({text})" if text else ""


def label(entry: Named) -> str:
    """Return the name of a test with its depth: `tg128 @ d2048`."""
    if entry.depth:
        return f"{entry.test} @ d{entry.depth}"
    return entry.test


def energy_line(document: RunDocument) -> str:
    """Return the parts of the machine that the energy per token is of; "" if it is unknown."""
    known = [entry.energy_per_token for entry in document.results if entry.energy_per_token is not None]
    if not known:
        return ""
    idle = known[0].idle_watts
    net = "absent, since idle power is unknown"
    if idle is not None:
        net = f"net of {idle:.1f} W idle"
    return f"energy per token of {known[0].parts}, {net}; up to {max(energy.watts for energy in known):.1f} W"


def energy_cell(entry: Result) -> str:
    """Format the energy per token net of idle power; "" if it is unknown."""
    energy = entry.energy_per_token
    if energy is None or energy.joules is None:
        return ""
    return format_joules(energy.joules)


def profile_rows(profile: Profile, width: int) -> list[tuple[str, Text]]:
    """Return (label, text) rows for a table; bars if the terminal is wide enough."""
    total = sum(profile.parts_ms.values())
    rows = [("profile", Text(headline(profile)))]
    for name, milliseconds in profile.parts_ms.items():
        line = Text(name.ljust(max(map(len, profile.parts_ms)) + 1))
        if width >= _BARS_FROM:
            filled = round(milliseconds / total * _BAR)
            line.append("━" * filled, "cyan").append("─" * (_BAR - filled), "dim")
        line.append(f" {milliseconds:7.3f} ms {percent(milliseconds / total):>6}")
        rows.append(("", line))
    return rows


def headline(profile: Profile) -> str:
    """Return the step's time as a sum of parts, measured without overlap, and in the loop; or that they disagree."""
    total = sum(profile.parts_ms.values())
    line = (
        f"one step at depth {profile.depth}: parts {total:.2f} ms, measured without overlap "
        f"{profile.synchronous_step_ms:.2f} ms ({percent(profile.closure, is_signed=True)}), "
        f"in the loop {profile.step_ms:.2f} ms"
    )
    if abs(profile.closure) > CLOSURE:
        return f"{line}: too far apart to trust, measure again on a quieter machine"
    return line


def profile_lines(profile: Profile) -> list[str]:
    """Return the profile as plain text."""
    parts = ", ".join(f"{name} {milliseconds:.3f} ms" for name, milliseconds in profile.parts_ms.items())
    return [headline(profile), parts]


def step_figures(document: RunDocument, entry: Result) -> StepFigures:
    """Return a decode test's means. The bandwidth is the one that its MBU compares with."""
    device = document.device
    batch = entry.batch
    speed = entry.tokens_per_second.mean
    step_bytes = entry.step_bytes or 0.0
    share = entry.mbu
    # GB/s that MBU is a share of, from its definition: share = step_bytes * steps per second / base.
    base = device.measured_peak_gb_s
    if share and speed > 0:
        base = step_bytes * speed / batch / share / 1e9
    others = [rep.other_cpus for rep in entry.repetitions if rep.other_cpus is not None]
    slowed_by = ""
    if entry.busy and others:
        slowed_by = other_cores(sum(others) / len(others), device.cores, "used")
    return StepFigures(
        step_bytes=step_bytes,
        step_s=batch / speed if speed > 0 else None,
        tokens=batch,
        sequences=batch,
        memory_gb_s=base if entry.mbu_paired else None,
        peak_gb_s=base,
        step_flops=(entry.arithmetic_intensity or 0.0) * step_bytes,
        compute_flops=(device.compute_gflop_s or 0.0) * 1e9 or None,
        slowed_by=slowed_by,
        ranks=len(document.hosts.ranks) if document.hosts is not None else 1,
    )
