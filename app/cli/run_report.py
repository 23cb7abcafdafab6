"""The report of one answer: the JSON document, the full table and the closing line.

All three show the same figures under the same names (defined in `runtime.metrics.telemetry`). Bandwidth is computed
from shapes and latencies, not read from a hardware counter.
"""

import sys
from dataclasses import asdict, dataclass
from typing import Any

import click

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import SamplingSource
from headrace.app.answer.phrases import phrases, sampling_phrase, sampling_text
from headrace.app.answer.sentence import StepFigures, cpu_phrase, sentence
from headrace.app.cli.json_output import print_json
from headrace.app.cli.run_arguments import RunArguments
from headrace.app.cli.run_session import RunSession
from headrace.app.cli.say import say
from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import may_style
from headrace.app.versions import versions
from headrace.models.loading.load import LoadedModel
from headrace.runtime import ops
from headrace.runtime.machine.bandwidth import measure_now
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import Peak, cached_peak, correct_peak
from headrace.runtime.metrics.telemetry import Percentiles, Summary, in_milliseconds, mbu, mbu_base
from headrace.runtime.metrics.units import format_bytes

_CUT_SHORT = {"max_tokens": "token limit", "context_limit": "context limit", "cancelled": "stopped"}


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished answer, with the model and the machine that gave it.

    session: id of the stored conversation. sampling_source: origin of the temperature. peak: the machine's measured
    peak. memory_now: read right after the answer.
    """

    model: LoadedModel
    answer: Answer
    load_s: float
    session: str | None
    sampling_source: SamplingSource
    machine: Machine
    peak: Peak
    memory_now: Peak
    kernels: dict[str, str]
    versions: dict[str, str]

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
        """Steps per second at the mean context, if its bytes moved at the measured peak."""
        return self.peak.bytes_per_second / self.step_bytes

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte of a step at the mean context."""
        return self.model.network.cost.step_flops(self.mean_past) / self.step_bytes

    @property
    def figures(self) -> StepFigures:
        """Means of the steps with an inter-token latency, for the sentence."""
        summary, use = self.summary, self.answer.cpu_use
        known = summary.step_s is not None and summary.tpot_s
        slowed_by = cpu_phrase(use, "used") if self.busy and use is not None else ""
        if self.without_kernels:
            slowed_by = "stock MLX runs instead of headrace's CPU kernels (see `headrace doctor`)"
        return StepFigures(
            step_bytes=summary.mean_step_bytes or self.step_bytes,
            step_s=summary.step_s,
            tokens=summary.step_s / summary.tpot_s if summary.step_s and summary.tpot_s else 1.0,
            proposed=summary.proposed if known else 0,
            accepted=summary.accepted if known else 0,
            memory_gb_s=self.mbu_base_gb_s,
            measured_beside=self.mbu_base_gb_s == self.memory_now.gb_s,
            slowed_by=slowed_by,
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
        """True if other programs slowed the answer down."""
        return self.answer.busy

    @property
    def mbu_base_gb_s(self) -> float:
        """The bandwidth that MBU compares with."""
        return mbu_base(self.summary.achieved_gb_s, self.memory_now.gb_s, self.peak.gb_s) or self.memory_now.gb_s

    @property
    def mbu(self) -> float | None:
        """MBU, paired with the bandwidth read right after the answer; None if busy."""
        return None if self.busy else mbu(self.summary.achieved_gb_s, self.memory_now.gb_s, self.peak.gb_s)


def make_report(answerer: Answerer, answer: Answer, session: RunSession, load_s: float) -> RunReport:
    """Return the report of a finished answer, with memory bandwidth read now."""
    memory_now = measure_now("run")
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
        kernels=ops.describe(),
        versions=versions(),
    )


def print_report(report: RunReport, arguments: RunArguments) -> None:
    """Print the report in the form that the arguments ask for."""
    if arguments.as_json:
        print_json(document(report, with_steps=arguments.with_steps))
    if arguments.stats:
        rows = table(report)
        width = max(len(label) for label, _ in rows)
        say("\n".join(f"{label:<{width}}  {value}" for label, value in rows), err=True)
    elif sys.stderr.isatty() and not arguments.quiet:
        line = sanitise(summary_line(report))
        click.echo(click.style(line, dim=True) if may_style(sys.stderr) else line, err=True)
    if arguments.explain:
        say(sentence(report.figures), err=True)


def document(report: RunReport, *, with_steps: bool) -> dict[str, Any]:
    """Return the `--json` document. Absent figures (one token has no inter-token latency) are null."""
    summary, answer = report.summary, report.answer
    found: dict[str, Any] = {
        "model": report.model.name,
        "session": report.session,
        "text": answer.text,
        "tokens": [token for step in answer.steps for token in step.tokens],
        "finish_reason": answer.end.reason,
        "ended_by": answer.ended_by,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.reused_tokens,
        "completion_tokens": summary.completion_tokens,
        "decode_steps": summary.steps,
        "proposed_tokens": summary.proposed,
        "accepted_tokens": summary.accepted,
        "context_limit": report.model.context_limit,
        "load_s": report.load_s,
        "ttft_s": answer.ttft_s,
        "tokenize_s": answer.prompt.tokenize_s,
        "prefill_s": summary.prefill_s,
        "first_step_s": summary.first_step_s,
        "prefill_tokens_per_second": summary.prefill_tokens_per_second,
        "tpot_s": summary.tpot_s,
        "decode_tokens_per_second": summary.decode_tokens_per_second,
        "itl_ms": in_milliseconds(summary.itl),
        "step_ms": in_milliseconds(summary.step_latency),
        "weight_bytes_per_step": summary.weight_bytes_per_step,
        "kv_format": report.model.kv.name if report.model.kv else None,
        "kv_bytes_per_token": summary.kv_bytes_per_token,
        "kv_cache_bytes": summary.kv_cache_bytes,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "achieved_bandwidth_gb_s": summary.achieved_gb_s,
        "memory_gb_s": report.memory_now.gb_s,
        "measured_peak_gb_s": report.peak.gb_s,
        "measured_peak": asdict(report.peak),
        "nominal_peak_gb_s": report.nominal_peak_gb_s,
        "mbu": report.mbu,
        "busy": report.busy,
        "other_cpus": report.answer.cpu_use.other_cpus if report.answer.cpu_use else None,
        "roofline_tokens_per_second": report.roofline_tokens_per_second,
        "arithmetic_intensity": report.arithmetic_intensity,
        "explanation": sentence(report.figures),
        "sampling": answer.sampling(),
        "sampling_source": report.sampling_source,
        "device": _device(report),
        "versions": report.versions,
    }
    if answer.steps and answer.steps[0].logprobs is not None:
        values = [values for step in answer.steps for values in step.logprobs or ()]
        found["logprobs"] = [{"chosen": value.chosen, "top": value.top} for value in values]
    if with_steps:
        found["steps"] = [
            {**asdict(record), "achieved_bandwidth_gb_s": record.achieved_gb_s} for record in answer.records
        ]
    return found


def _device(report: RunReport) -> dict[str, Any]:
    return {
        "name": report.machine.device_name,
        "backend": report.machine.backend,
        "memory_bytes": report.machine.memory_bytes,
        "kernels": report.kernels,
        "network": report.model.kind,
    }


def summary_line(report: RunReport) -> str:
    """Return the closing line of an answer on a terminal, within 80 columns."""
    summary = report.summary
    shown = None if report.without_kernels else report.mbu
    busy = report.busy and not report.without_kernels
    rate = summary.decode_tokens_per_second
    parts = phrases(summary.completion_tokens, rate, report.answer.ttft_s, shown, busy=busy)
    if summary.accepted:
        parts.insert(2, f"{summary.completion_tokens / summary.steps:.2f} tok/step")
    elif shown is not None:  # there is no room for both
        parts[-1] += f" of {report.mbu_base_gb_s:.0f} GB/s"
    if report.without_kernels:
        parts.append("slow: see doctor")
    parts.append(sampling_text(asdict(report.answer.request.sampling), short=True))
    if report.answer.end.reason != "stop":
        parts.append(_CUT_SHORT[report.answer.ended_by])
    return " · ".join(parts)


def table(report: RunReport) -> list[tuple[str, str]]:
    """Return all figures as (label, value) rows, for `--stats`."""
    summary, answer = report.summary, report.answer
    cached = summary.reused_tokens
    rows = [
        ("model", f"{report.model.name} ({report.model.kind} decoder, {report.kernels.get('kernels', '?')} kernels)"),
        ("device", f"{report.machine.device_name} ({report.machine.backend})"),
        ("sampling", sampling_phrase(answer.request.sampling, report.sampling_source)),
        ("finish reason", f"{answer.end.reason} ({answer.ended_by.replace('_', ' ')})"),
        ("prompt", f"{summary.prompt_tokens} tokens" + (f", {cached} cached" if cached else "")),
        ("completion", f"{summary.completion_tokens} tokens in {summary.steps} steps"),
        ("load", f"{report.load_s:.3f} s"),
        ("TTFT", _seconds(answer.ttft_s)),
        ("  tokenize", _seconds(answer.prompt.tokenize_s)),
        ("  prefill", f"{_seconds(summary.prefill_s)}, {_rate(summary.prefill_tokens_per_second)}"),
        ("  first step", _seconds(summary.first_step_s)),
        ("decode", f"{_rate(summary.decode_tokens_per_second)}, TPOT {_seconds(summary.tpot_s)}"),
        ("ITL", _itl(summary.itl)),
        *([("draft tokens", _drafts(summary))] if summary.proposed else []),
        ("weights per step", format_bytes(summary.weight_bytes_per_step)),
        ("KV cache", f"{_kv(report)}, {format_bytes(summary.kv_bytes_per_token)} per token"),
        ("peak memory", f"{format_bytes(summary.peak_memory_bytes)} (MLX)"),
        ("achieved", f"{_gb_s(summary.achieved_gb_s)} (computed from shapes)"),
        ("memory now", f"{_gb_s(report.memory_now.gb_s)}, read after the answer"),
        ("measured peak", f"{_gb_s(report.peak.gb_s)} ({report.peak.source}, {report.peak.measured_at})"),
        ("nominal peak", _gb_s(report.nominal_peak_gb_s)),
        ("MBU", _mbu(report)),
    ]
    roofline = report.roofline_tokens_per_second
    unit = "steps/s" if summary.accepted else "tok/s"
    rows.append(("roofline", f"{roofline:.1f} {unit} at {format_bytes(report.step_bytes)} per step"))
    rows.append(("intensity", f"{report.arithmetic_intensity:.2f} FLOPs per byte"))
    return rows


def _kv(report: RunReport) -> str:
    """Return the cache's size, and its format if packed."""
    size = format_bytes(report.summary.kv_cache_bytes)
    kv = report.model.kv
    return f"{size} as {kv.name}" if kv and kv.packed else size


def _mbu(report: RunReport) -> str:
    use = report.answer.cpu_use
    if report.busy and use is not None:
        return f"busy: other programs used {use.other_cpus:.1f} of {use.cpus} cores during the answer"
    if report.mbu is None:
        return "unknown"
    paired = report.mbu_base_gb_s == report.memory_now.gb_s
    return f"{report.mbu:.1%} of {'memory now' if paired else 'the measured peak'}"


def _itl(itl: Percentiles | None) -> str:
    if itl is None:
        return "needs two tokens"
    return " ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in in_milliseconds(itl).items())


def _drafts(summary: Summary) -> str:
    share = summary.accepted / summary.proposed
    per_step = summary.completion_tokens / summary.steps
    return f"{summary.accepted} of {summary.proposed} accepted ({share:.0%}), {per_step:.2f} tokens per step"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} tok/s"


def _gb_s(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} GB/s"
