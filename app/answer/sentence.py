"""Decode speed in words: bytes of a token, the machine's limit, the speed, and the time that is not reading.

Every surface shows this sentence: `run --explain`, the decode view and `bench`. Each fills `StepFigures` from its own
records. Bytes and FLOPs are computed from shapes, bandwidth is measured.

Guards: tests/app/answer/test_sentence.py; tests/tui/decode/test_meters.py for the panel.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.app.output.sanitise import sanitise
from headrace.runtime.metrics.cost import StepLimit, step_limit
from headrace.runtime.metrics.telemetry import MBU, mbu
from headrace.runtime.metrics.units import format_bytes, format_seconds, percent, three_digits

if TYPE_CHECKING:
    from headrace.runtime.machine.machine_load import CPUUse

_NAME = 24  # characters of another program's name that are shown
_ALL = 0.995  # share of a step from which all of it counts as reading: it rounds to 100 %
ABOVE_PEAK = 1.005  # share of the measured peak above which a step beats it: less rounds to 100 %


class StepFigures(Struct, frozen=True, kw_only=True):
    """Means over decode steps, and limits of the machine; None if unknown, 0 for `step_bytes` and `step_flops`.

    step_bytes: read and written by a step.
    step_s: latency of a step.
    tokens: output tokens of a step, all sequences.
    sequences: sequences in a step.
    proposed: draft tokens of all steps.
    accepted: those of them that were accepted.
    memory_gb_s: memory bandwidth read during the steps.
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
        achieved_gb_s = None
        if self.step_s:
            achieved_gb_s = self.step_bytes / self.step_s / 1e9
        return mbu(achieved_gb_s, self.memory_gb_s, self.peak_gb_s)

    @property
    def rate(self) -> float | None:
        """Tokens per second."""
        if self.step_s is None or self.step_s <= 0:
            return None
        return self.tokens / self.step_s

    @property
    def reading_s(self) -> float | None:
        """Least seconds to read and write a step's bytes."""
        base_gb_s = self.mbu.base_gb_s
        if base_gb_s is None or base_gb_s <= 0:
            return None
        return self.step_bytes / (base_gb_s * 1e9)

    @property
    def base_flops(self) -> float | None:
        """FLOP/s that the limit counts with: the measured ones, or those of the steps if they exceed them."""
        if self.compute_flops and self.step_s and self.step_s > 0:
            return max(self.compute_flops, self.step_flops / self.step_s)
        return self.compute_flops

    @property
    def limit(self) -> StepLimit | None:
        """The limit of a step by memory and arithmetic; None without a bandwidth."""
        base_gb_s = self.mbu.base_gb_s
        if base_gb_s is None or base_gb_s <= 0:
            return None
        return step_limit(self.step_bytes, self.step_flops, base_gb_s * 1e9, self.base_flops)

    @property
    def least_s(self) -> float | None:
        """Least seconds of a step."""
        if self.limit is None:
            return None
        return self.limit.seconds

    @property
    def is_arithmetic_bound(self) -> bool:
        """True if arithmetic limits the step, and not memory."""
        return self.limit is not None and self.limit.roof == "arithmetic"

    @property
    def roofline_rate(self) -> float | None:
        """Most tokens per second by both limits."""
        if not self.least_s:
            return None
        return self.tokens / self.least_s

    @property
    def share(self) -> float | None:
        """Part of a step that its limit explains, above 1 for a step faster than the limit."""
        if self.least_s is None or self.step_s is None or self.step_s <= 0:
            return None
        return self.least_s / self.step_s


def sentence(figures: StepFigures) -> str:
    """Return the bytes of a step, the limit that follows from them, and the speed."""
    if figures.step_bytes >= 1:
        return " ".join([_bytes_sentence(figures), _limit_sentence(figures), _speed_sentence(figures)])
    if figures.rate is None:
        return "No model is loaded."
    return f"{three_digits(figures.rate)} tok/s; a step's bytes are unknown."


def cause(figures: StepFigures) -> str:
    """Return in one short line why steps are not faster; "" before their time is known."""
    # The order of `_speed_sentence`: `slowed_by` explains only the rest of a step above its limit.
    work = "computing" if figures.is_arithmetic_bound else "reading"
    if figures.share is not None and figures.share > ABOVE_PEAK:  # a difference of less is measurement error
        return "Above the measured peak."
    if figures.share is not None and figures.share >= _ALL:
        return f"All of a step is {work}."
    if figures.slowed_by:
        short = figures.slowed_by.partition(" (")[0]  # without the program's name: `... cores (mostly pip)`
        return f"{short[0].upper()}{short[1:]}."
    if figures.share is None or figures.least_s is None or figures.step_s is None:
        return ""
    rest = format_seconds(figures.step_s - figures.least_s)
    return f"{rest} of a step is not {work}."


CPU_BUSY = "other programs used the CPU"
"""`cpu_phrase` where it is not known how much."""


def cpu_phrase(use: "CPUUse", verb: str = "use") -> str:
    """Return `other programs use 1.7 of 2 cores (mostly pip)`."""
    from headrace.runtime.machine.machine_load import MachineLoad  # it imports sensors, which no first frame has

    phrase = other_cores(use.other_cpus, use.cpus, verb)
    busiest = ""
    if isinstance(use, MachineLoad):
        busiest = sanitise(use.busiest)[:_NAME]
    if busiest:
        phrase += f" (mostly {busiest})"
    return phrase


def other_cores(other_cpus: float, cores: int | None, verb: str) -> str:
    """Return `other programs used 1.7 of 2 cores`. cores: of the machine; None if unknown."""
    total = f" of {cores}" if cores else ""
    return f"other programs {verb} {other_cpus:.1f}{total} cores"


def _bytes_sentence(figures: StepFigures) -> str:
    """Return `Each token reads 1.3 GB.`, or the same of a step of several sequences or with draft tokens."""
    size = format_bytes(round(figures.step_bytes))
    if figures.ranks > 1:
        size += f" on rank 0 of {figures.ranks}"
    if figures.sequences <= 1 and not figures.proposed:
        return f"Each token reads {size}."
    phrase = f"Each step reads {size} and gives {figures.tokens:.1f} token"
    if figures.tokens != 1:
        phrase += "s"
    if figures.sequences > 1:
        phrase += f" for {figures.sequences:.3g} sequences"
    if figures.proposed:
        phrase += f": {percent(figures.accepted / figures.proposed)} of draft tokens were accepted"
    return f"{phrase}."


def _limit_sentence(figures: StepFigures) -> str:
    """Return `This machine reads up to 20.0 GB/s, so at most 15.4 tok/s.`, or the limit by arithmetic."""
    base_gb_s = figures.mbu.base_gb_s
    if base_gb_s is None or figures.roofline_rate is None:
        return "This machine's memory bandwidth is not measured yet."
    at_most = f"so at most {three_digits(figures.roofline_rate)} tok/s."
    if figures.is_arithmetic_bound:
        gflop = three_digits(figures.step_flops / 1e9)
        gflop_s = three_digits((figures.base_flops or 0.0) / 1e9)
        return f"Its {gflop} GFLOP take longer than its bytes, at {gflop_s} GFLOP/s, {at_most}"
    reads = "now reads" if figures.mbu.measured_beside else "reads up to"
    return f"This machine {reads} {three_digits(base_gb_s)} GB/s, {at_most}"


def _speed_sentence(figures: StepFigures) -> str:
    """Return `You get 14.1: 5.9 ms of each 70.9 ms step is not reading.`, with the cause if one is known."""
    if figures.rate is None or figures.step_s is None:
        return "No speed yet: it needs two steps."
    get = f"You get {three_digits(figures.rate)}"
    because = ""
    if figures.slowed_by:
        because = f", in part because {figures.slowed_by}"
    if figures.least_s is None or figures.share is None:
        return f"{get} tok/s{because}."
    is_shown_as_limit = three_digits(figures.rate) == three_digits(figures.roofline_rate or 0.0)
    # The limit and the speed stand next to each other here, so any difference that their digits show is explained.
    # `slowed_by` is left out: a step above its limit was not slowed.
    if figures.share > 1 and not is_shown_as_limit:
        return f"{get}, above that: some bytes came from a cache, or memory was slower when it was measured."
    work = "computing" if figures.is_arithmetic_bound else "reading"
    if figures.share >= _ALL:  # nothing of the step is left for `slowed_by` to explain
        return f"{get}: nearly all of a step is {work}."
    rest = format_seconds(figures.step_s - figures.least_s)
    return f"{get}: {rest} of each {format_seconds(figures.step_s)} step is not {work}{because}."
