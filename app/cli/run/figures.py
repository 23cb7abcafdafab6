"""Figures of one answer, with the model and the machine that gave it."""

from dataclasses import dataclass

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import SamplingSource
from headrace.app.answer.sentence import OTHERS, StepFigures, cpu_phrase
from headrace.app.cli.run.session import RunSession
from headrace.app.versions import versions
from headrace.models.loading.load import LoadedModel
from headrace.runtime import ops
from headrace.runtime.machine.bandwidth import read_hourly
from headrace.runtime.machine.compute import cached_compute
from headrace.runtime.machine.energy import TokenEnergy, idle_watts, per_token
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import Peak, cached_peak, correct_peak
from headrace.runtime.metrics.limit import StepLimit, step_limit
from headrace.runtime.metrics.telemetry import MBU, Summary, mbu


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished answer, with the model and the machine that gave it.

    session: id of the stored conversation. sampling_source: origin of the temperature. peak: the machine's measured
    peak. memory_now: its newest reading, of the last hour. compute_flops: its measured FLOP/s; None if not measured.
    """

    model: LoadedModel
    answer: Answer
    load_s: float
    session: str | None
    sampling_source: SamplingSource
    machine: Machine
    peak: Peak
    memory_now: Peak
    compute_flops: float | None
    kernels: dict[str, str]
    versions: dict[str, str]
    energy: TokenEnergy | None = None
    """Energy of each token but those of the first step; None if unknown."""

    @property
    def summary(self) -> Summary:
        return self.answer.end.summary

    @property
    def mean_past(self) -> int:
        """Mean number of cache entries before a step, over the steps with an inter-token latency."""
        records = self.answer.records
        pasts = [record.context - 1 for record in records[1:] or records]
        return round(sum(pasts) / len(pasts)) if pasts else self.summary.prompt_tokens - 1

    @property
    def step_bytes(self) -> int:
        """Bytes of a step at the mean context."""
        return self.model.network.cost.step_bytes(self.mean_past)

    @property
    def roofline_tokens_per_second(self) -> float:
        """Steps per second at the mean context, at most: by the measured peak and arithmetic."""
        return 1 / self.limit.seconds

    @property
    def step_flops(self) -> int:
        """FLOPs of a step at the mean context."""
        return self.model.network.cost.step_flops(self.mean_past)

    @property
    def limit(self) -> StepLimit:
        """The limit of a step at the mean context."""
        return step_limit(self.step_bytes, self.step_flops, self.peak.bytes_per_second, self.compute_flops)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte of a step at the mean context."""
        return self.step_flops / self.step_bytes

    @property
    def figures(self) -> StepFigures:
        """Means of the steps with an inter-token latency, for the sentence."""
        summary = self.summary
        use = self.answer.cpu_use
        known = summary.step_s is not None and summary.tpot_s
        if not self.busy:
            slowed_by = ""
        elif use is None:
            slowed_by = OTHERS
        else:
            slowed_by = cpu_phrase(use, "used")
        if self.without_kernels:
            slowed_by = "stock MLX runs instead of headrace's CPU kernels (see `headrace doctor`)"
        return StepFigures(
            step_bytes=summary.mean_step_bytes or self.step_bytes,
            step_s=summary.step_s,
            tokens=summary.step_s / summary.tpot_s if summary.step_s and summary.tpot_s else 1.0,
            proposed=summary.proposed if known else 0,
            accepted=summary.accepted if known else 0,
            peak_gb_s=self.peak.gb_s,
            step_flops=self.step_flops * (1 + summary.proposed / summary.steps if known and summary.steps else 1),
            compute_flops=self.compute_flops,
            slowed_by=slowed_by,
            ranks=len(self.model.ranks) or 1,
        )

    @property
    def without_kernels(self) -> bool:
        """True if stock MLX operations ran on a CPU, where the native kernels are several times as fast."""
        return self.machine.backend == "cpu" and self.kernels.get("kernels") == "reference"

    @property
    def nominal_peak_gb_s(self) -> float | None:
        nominal = self.machine.nominal_bandwidth
        return nominal / 1e9 if nominal else None

    @property
    def busy(self) -> bool:
        """True if other programs slowed the answer down, or for a short one the reading of memory after it."""
        return self.answer.busy or (self.answer.cpu_use is None and self.memory_now.busy)

    @property
    def mbu(self) -> MBU:
        """MBU, paired with the newest reading of bandwidth."""
        return mbu(self.summary.achieved_gb_s, self.memory_now.gb_s, self.peak.gb_s, busy=self.busy)


def make_report(answerer: Answerer, answer: Answer, session: RunSession, load_s: float) -> RunReport:
    """Return the report of a finished answer. Memory bandwidth is read now, unless it was within the hour."""
    memory_now = read_hourly("run")
    summary = answer.end.summary
    correct_peak(summary.achieved_gb_s, step_bytes=summary.mean_step_bytes, steps=summary.steps)
    return RunReport(
        model=answerer.model,
        answer=answer,
        load_s=load_s,
        session=session.id,
        sampling_source=session.sampling_source(answerer.model),
        machine=machine(),
        peak=cached_peak() or memory_now,
        memory_now=memory_now,
        compute_flops=cached_compute(),
        kernels=ops.describe(),
        versions=versions(),
        energy=_energy(answer),
    )


def _energy(answer: Answer) -> TokenEnergy | None:
    """Return the energy per token of an answer, net of the machine's idle power, measured now (under a second)."""
    if answer.energy is None or answer.sensors is None:
        return None
    tokens = sum(record.tokens for record in answer.records[1:])
    return per_token([answer.energy], tokens, idle_watts(answer.sensors))
