"""Figures of the decode view: a step's parts, a window of latencies, the roofline. Every surface reads them here.

Bytes and FLOPs are computed from shapes, times are measured. A step's time by part is measured in the kernels for some
steps, see `runtime.engine.step_timer`; without such steps it is computed from bytes and bandwidth.

Pure functions: `LiveMetrics` calls them, and a section of `app/tui/decode/` draws the result. The names of parts are
keys of `_LOOKS` in `decode/step.py`. Guards: tests/tui/metrics/test_figures.py and tests/tui/test_charts.py.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from headrace.app.answer.sentence import ABOVE_PEAK, StepFigures
from headrace.app.tui.metrics.facts import MachineFacts, MeasuredPrefill
from headrace.app.tui.metrics.rates import StepTotals
from headrace.runtime.metrics.cost import StepCost, step_limit
from headrace.runtime.metrics.telemetry import Percentiles, StepRecord
from headrace.runtime.metrics.units import percent

STALL = 3.0  # a step this many times slower than the median is a stall
MIN_STEPS = 8  # before that many steps a median says little
_TIMED = 16  # newest timed steps that a mean is of
_LOOKED_AT = 64  # steps that are looked at for each of these: one step in 16 is timed, or all
_GC_SHARE = 0.5  # part of a stall beyond the median that garbage collection has to explain

Parts = Sequence[tuple[str, float]]
"""Parts of a whole, (name, value)."""


class StepTimes(Struct, frozen=True):
    """Seconds of a mean step by part; they sum to `total_s`.

    timed: number of steps measured in the kernels, 0 if the parts are computed.
    every: distance of the newest two timed steps.
    span: steps from the first timed one to the newest.
    """

    parts: Parts
    total_s: float
    timed: int = 0
    every: int = 0
    span: int = 0


def step_times(figures: StepFigures, weight_bytes: float, steps: Sequence[StepRecord]) -> StepTimes | None:
    """Return the parts of a mean step of `steps`; None before the second step."""
    total = figures.step_s
    if not total or total <= 0:
        return None
    newest = list(steps)[-_TIMED * _LOOKED_AT :]
    timed = [step for step in newest if step.parts is not None and step.latency_s > 0][-_TIMED:]
    if timed:
        # Timed steps have the same shares as the mean one, which may be faster or slower.
        parts = [(name, share * total) for name, share in _timed_shares(timed)]
        indices = [step.index for step in timed]
        every = len(steps)
        if len(indices) > 1:
            every = indices[-1] - indices[-2]
        span = steps[-1].index - indices[0] + 1
        return StepTimes(parts, total, len(timed), max(1, every), span)
    if figures.reading_s is None or figures.step_bytes <= 0:
        return StepTimes([("not timed", total)], total)
    # No timed steps: the time that the bytes take at the measured bandwidth.
    reading = min(total, figures.reading_s)
    weights = reading * min(1.0, weight_bytes / figures.step_bytes)
    return StepTimes([("weights", weights), ("KV", reading - weights), ("not reading", total - reading)], total)


def _timed_shares(timed: Sequence[StepRecord]) -> Parts:
    """Return the share of each part in the time of steps that were timed by part; they sum to 1."""
    whole = sum(step.latency_s for step in timed)
    parts_of = [(step.parts.named(), step.latency_s) for step in timed if step.parts is not None]
    shares: dict[str, float] = {}
    for named, latency in parts_of:
        known = sum(named.values())
        scale = min(1.0, latency / known) if known > 0 else 0.0  # a neighbour's work may be measured, too
        for name, seconds in named.items():
            shares[name] = shares.get(name, 0.0) + seconds * scale / whole
    other = max(0.0, 1.0 - sum(shares.values()))
    ordered = [("weights", shares["weights"]), ("KV", shares["KV"]), ("the rest", other)]
    return ordered + [(name, shares[name]) for name in ("sampling", "host", "waiting")]


def step_bytes(figures: StepFigures, cost: StepCost | None) -> Parts:
    """Return the bytes of a mean step by part; they sum to its bytes."""
    if cost is None or figures.step_bytes <= 0:
        return []
    weights = min(cost.weight_bytes, figures.step_bytes)
    whole = max(cost.weight_bytes, sum(nbytes for _, nbytes in cost.weight_parts))
    named = [(name, nbytes * weights / whole) for name, nbytes in cost.weight_parts if nbytes]
    rest = weights - sum(nbytes for _, nbytes in named)
    if rest > 0.5:
        named.append(("weights" if not named else "other weights", rest))
    return [*named, ("KV", figures.step_bytes - weights)]


# -- latency -------------------------------------------------------------------------------------------------------


class LatencyWindow(Struct, frozen=True):
    """Consecutive steps of an answer, the oldest first.

    steps: those that are drawn.
    percentiles: of all kept steps of the answer, as in the meters.
    stalls: cause of each stall, by its index in `steps`; "" if it is not known.
    """

    steps: Sequence[StepRecord]
    percentiles: Percentiles
    stalls: Mapping[int, str] = field(default_factory=dict)

    @property
    def latencies_s(self) -> list[float]:
        return [step.latency_s for step in self.steps]


def latency_window(
    steps: Sequence[StepRecord],
    percentiles: Percentiles | None,
    busy: Iterable[StepRecord],
    count: int,
    *,
    back: int = 0,
) -> LatencyWindow | None:
    """Return the newest `count` of the steps, without the `back` newest of all; None without steps.

    steps: all kept ones with a latency.
    percentiles: their percentiles.
    busy: steps while other programs used the CPUs.
    """
    end = max(0, len(steps) - back)
    shown = steps[max(0, end - max(1, count)) : end]
    if percentiles is None or not shown:
        return None
    stalls = {}
    if len(steps) >= MIN_STEPS and percentiles.p50 > 0:
        crowded = {(step.index, step.latency_s) for step in busy}
        for index, step in enumerate(shown):
            if step.latency_s >= STALL * percentiles.p50:
                before = shown[index - 1] if index else None
                is_crowded = (step.index, step.latency_s) in crowded
                stalls[index] = stall_cause(step, before, percentiles.p50, crowded=is_crowded)
    return LatencyWindow(shown, percentiles, stalls)


def stall_cause(step: StepRecord, before: StepRecord | None, usual_s: float, *, crowded: bool) -> str:
    """Return the known cause of a slow step; "" if there is none. `decode.latency` marks it by the first word.

    step: the slow one.
    before: the step before it; None if it is not kept.
    usual_s: median latency.
    crowded: other programs used CPUs that decoding needs.
    """
    if step.fed:
        return "prefill of another sequence"
    if step.gc_s > _GC_SHARE * (step.latency_s - usual_s):
        return "garbage collection"
    if before is not None:
        has_grown = step.kv_allocated_bytes > before.kv_allocated_bytes
        if has_grown and step.active_memory_bytes > before.active_memory_bytes:
            return "growth of the KV cache"
    return "other programs" if crowded else ""


def histogram(latencies_s: Sequence[float], top_s: float, rows: int) -> list[int]:
    """Return the number of steps in each of `rows` equal ranges from 0 to `top_s`, the slowest first.

    Steps above `top_s` count in the first.
    """
    counts = [0] * rows
    for latency in latencies_s:
        row = 0
        if top_s > 0:
            row = min(rows - 1, int(latency / top_s * rows))
        counts[rows - 1 - row] += 1
    return counts


# -- roofline ------------------------------------------------------------------------------------------------------


class RooflinePoint(Struct, frozen=True):
    """A place on the roofline plot: FLOP per byte, FLOP per second."""

    intensity: float
    flops: float

    @classmethod
    def of(cls, flops: float, nbytes: float, seconds: float) -> "RooflinePoint | None":
        if flops <= 0 or nbytes <= 0 or seconds <= 0:
            return None
        return cls(flops / nbytes, flops / seconds)


class Roofs(Struct, frozen=True):
    """Limits of the machine, bytes per second and FLOP per second; None if unknown. vendors: compute not measured."""

    memory: float | None
    nominal: float | None
    compute: float | None
    vendors: bool = False

    def why_above(self, point: RooflinePoint) -> str:
        """Return the reason for a point above a roof; "" for one below both."""
        if self.memory is not None and point.flops > self.memory * point.intensity * ABOVE_PEAK:
            return "above the measured memory bandwidth"
        if self.compute is not None and point.flops > self.compute * ABOVE_PEAK:
            return "above the measured compute peak"
        return ""

    def limit_of(self, point: RooflinePoint) -> str:
        """Return the roof over a point in words, and the share of it that the point reaches."""
        if not self.memory or not point.intensity:
            return ""
        limit = step_limit(1.0, point.intensity, self.memory, self.compute)
        used = f"{limit.roof} limits it, {percent(point.flops * limit.seconds / point.intensity)} used"
        if limit.roof == "memory" and self.compute:
            return f"{used}; arithmetic from {self.compute / self.memory:.3g} FLOP/B"
        return used


def roofs(machine: MachineFacts) -> Roofs:
    """Return the machine's limits."""
    compute = machine.flops_per_second
    memory, nominal = (gb_s * 1e9 if gb_s else None for gb_s in (machine.measured_gb_s, machine.nominal_gb_s))
    return Roofs(memory, nominal, compute, not machine.compute_flops and compute is not None)


def decode_point(totals: StepTotals) -> RooflinePoint | None:
    """Return the point of these steps. All verified rows count."""
    return RooflinePoint.of(totals.flops, totals.nbytes, totals.seconds)


def prefill_point(prefill: MeasuredPrefill | None) -> RooflinePoint | None:
    """Return the point of a prefill, if there is one."""
    if prefill is None:
        return None
    return RooflinePoint.of(prefill.flops, prefill.nbytes, prefill.seconds)


class Trail:
    """Points of the turn, one for about half a second of decoding; the oldest are thinned out."""

    EVERY_S = 0.5
    MOST = 64

    def __init__(self) -> None:
        self.points: list[RooflinePoint] = []
        # The turn's totals up to the latest point
        self._flops = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, totals: StepTotals) -> None:
        """Take in the turn's totals, which only grow."""
        if totals.seconds - self._seconds < self.EVERY_S:
            return
        point = RooflinePoint.of(
            totals.flops - self._flops, totals.nbytes - self._bytes, totals.seconds - self._seconds
        )
        self._flops = totals.flops
        self._bytes = totals.nbytes
        self._seconds = totals.seconds
        if point is not None:
            self.points.append(point)
        if len(self.points) > self.MOST:
            del self.points[: self.MOST // 2 : 2]  # every other one of the older half: the curve stays whole
