"""Decode speed in words: bytes of a token, the machine's limit, the speed, and the time that is not reading.

Every surface shows this sentence. Bytes and FLOPs are computed from shapes, bandwidth is measured.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.app.output.sanitise import sanitise
from headrace.runtime.metrics.cost import StepLimit, step_limit
from headrace.runtime.metrics.telemetry import MBU, mbu
from headrace.runtime.metrics.units import format_bytes, format_seconds, percent, three_digits

if TYPE_CHECKING:
    from headrace.runtime.machine.load import CPUUse

_NAME = 24  # characters of another program's name
_ALL = 0.995  # share of a step from which all of it counts as reading


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Means over decode steps, and limits of the machine; None if unknown.

    step_bytes: read and written by a step.
    step_s: latency of a step.
    tokens: output tokens of a step, all sequences.
    sequences: sequences in a step.
    proposed, accepted: draft tokens of all steps.
    memory_gb_s: memory bandwidth read beside the steps.
    peak_gb_s: measured peak of the memory bandwidth.
    step_flops: FLOPs of a step.
    compute_flops: measured FLOP/s.
    slowed_by: a cause of slowness, as the end of a sentence; "" if there is none.
    ranks: machines that share the model; bytes and FLOPs are those of rank 0.
    """

    step_bytes: float
    step_s: float | None = None
    tokens: float = 1.0
    sequences: float = 1.0
    proposed: int = 0
    accepted: int = 0
    memory_gb_s: float | None = None
    peak_gb_s: float | None = None
    step_flops: float = 0.0
    compute_flops: float | None = None
    slowed_by: str = ""
    ranks: int = 1

    @property
    def mbu(self) -> MBU:
        """MBU of the steps, also of slowed ones."""
        achieved = self.step_bytes / self.step_s / 1e9 if self.step_s else None
        return mbu(achieved, self.memory_gb_s, self.peak_gb_s)

    @property
    def rate(self) -> float | None:
        """Tokens per second."""
        return self.tokens / self.step_s if self.step_s and self.step_s > 0 else None

    @property
    def reading_s(self) -> float | None:
        """Least seconds to read and write a step's bytes."""
        base = self.mbu.base_gb_s
        return self.step_bytes / (base * 1e9) if base and base > 0 else None

    @property
    def limit(self) -> StepLimit | None:
        """The limit of a step by memory and arithmetic; None without a bandwidth."""
        base_gb_s = self.mbu.base_gb_s
        if not base_gb_s or base_gb_s <= 0:
            return None
        flops_per_second = self.compute_flops
        if flops_per_second and self.step_s and self.step_s > 0:  # the steps may exceed the measured FLOP/s
            flops_per_second = max(flops_per_second, self.step_flops / self.step_s)
        return step_limit(self.step_bytes, self.step_flops, base_gb_s * 1e9, flops_per_second)

    @property
    def least_s(self) -> float | None:
        """Least seconds of a step."""
        return None if self.limit is None else self.limit.seconds

    @property
    def roofline_rate(self) -> float | None:
        """Most tokens per second by both limits."""
        return self.tokens / self.least_s if self.least_s else None

    @property
    def share(self) -> float | None:
        """Part of a step that its limit explains, above 1 for a step faster than the limit."""
        return self.least_s / self.step_s if self.least_s is not None and self.step_s and self.step_s > 0 else None


def sentence(of: StepFigures) -> str:
    """Return what a step reads, the limit that follows, and the speed."""
    if of.step_bytes < 1:
        speed = of.rate
        return "No model is loaded." if speed is None else f"{three_digits(speed)} tok/s; a step's bytes are unknown."
    return " ".join([_bytes(of), _limit(of), _speed(of)])


def cause(of: StepFigures) -> str:
    """Return in one short line why steps are not faster; "" before their time is known."""
    if of.slowed_by:
        short = of.slowed_by.partition(" (")[0]
        return f"{short[0].upper()}{short[1:]}."
    if of.share is None or of.least_s is None or of.step_s is None:
        return ""
    arithmetic = of.limit is not None and of.limit.roof == "arithmetic"
    if of.share > 1:
        return "Above the limit: some bytes came from a cache."
    if of.share >= _ALL:
        return "All of a step is computing." if arithmetic else "All of a step is reading."
    rest = format_seconds(of.step_s - of.least_s)
    return f"{rest} of a step is not {'computing' if arithmetic else 'reading'}."


OTHERS = "other programs used the CPU"
"""`cpu_phrase` where it is not known how much."""


def cpu_phrase(use: "CPUUse", verb: str = "use") -> str:
    """Return `other programs use 1.7 of 2 cores (mostly pip)`."""
    from headrace.runtime.machine.load import Load  # it imports sensors, which no first frame has

    busiest = sanitise(use.busiest)[:_NAME] if isinstance(use, Load) else ""
    mostly = f" (mostly {busiest})" if busiest else ""
    return f"{other_cores(use.other_cpus, use.cpus, verb)}{mostly}"


def other_cores(other_cpus: float, cores: int | None, verb: str) -> str:
    """Return `other programs used 1.7 of 2 cores`. cores: of the machine; None if unknown."""
    total = f" of {cores}" if cores else ""
    return f"other programs {verb} {other_cpus:.1f}{total} cores"


def _bytes(of: StepFigures) -> str:
    size = format_bytes(round(of.step_bytes)) + (f" on rank 0 of {of.ranks}" if of.ranks > 1 else "")
    if of.sequences <= 1 and not of.proposed:
        return f"Each token reads {size}."
    gives = f"{of.tokens:.1f} token" if of.tokens == 1 else f"{of.tokens:.1f} tokens"
    rows = f" for {of.sequences:.3g} sequences" if of.sequences > 1 else ""
    drafts = f": {percent(of.accepted / of.proposed)} of draft tokens were accepted" if of.proposed else ""
    return f"Each step reads {size} and gives {gives}{rows}{drafts}."


def _limit(of: StepFigures) -> str:
    roofline_rate = of.roofline_rate
    base = of.mbu.base_gb_s
    if base is None or roofline_rate is None:
        return "This machine's memory bandwidth is not measured yet."
    if of.limit is not None and of.limit.roof == "arithmetic":
        flops = three_digits(of.step_flops / 1e9)
        speed = three_digits((of.compute_flops or 0.0) / 1e9)
        computes = f"Its {flops} GFLOP take longer than its bytes, at {speed} GFLOP/s"
        return f"{computes}, so at most {three_digits(roofline_rate)} tok/s."
    reads = "now reads" if of.mbu.measured_beside else "reads up to"
    return f"This machine {reads} {three_digits(base)} GB/s, so at most {three_digits(roofline_rate)} tok/s."


def _speed(of: StepFigures) -> str:
    if of.rate is None or of.step_s is None:
        return "No speed yet: it needs two steps."
    get = f"You get {three_digits(of.rate)}"
    because = f", in part because {of.slowed_by}" if of.slowed_by else ""
    if of.least_s is None or of.share is None:
        return f"{get} tok/s{because}."
    if of.share > 1 and three_digits(of.rate) != three_digits(of.roofline_rate or 0.0):
        return f"{get}, above that: some bytes came from a cache, or memory was slower when it was measured."
    spent = "computing" if of.limit is not None and of.limit.roof == "arithmetic" else "reading"
    if of.share >= _ALL:
        return f"{get}: nearly all of a step is {spent}."
    rest = format_seconds(of.step_s - of.least_s)
    return f"{get}: {rest} of each {format_seconds(of.step_s)} step is not {spent}{because}."
