"""The report of one answer: the JSON document, the full table and the closing line.

All three show the same figures under the same names (defined in `runtime.metrics.telemetry`). Bandwidth is computed
from shapes and latencies, not read from a hardware counter. A new figure is a property of `RunReport` or a field of
`Summary`, a key of `document` with a row in docs/run-json.md, and a row of `table`.

Guard: tests/app/cli/run/test_answer_report.py.
"""

import json
import sys

import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import SamplingSource
from headrace.app.answer.phrases import phrases, sampling_phrase, sampling_text
from headrace.app.answer.sentence import CPU_BUSY, StepFigures, cpu_phrase, sentence
from headrace.app.answer.usage import named_figures
from headrace.app.cli.run.arguments import RunArguments
from headrace.app.cli.run.session import RunSession
from headrace.app.cli.say import dimmed, print_json, say
from headrace.app.output.output_file import write_output
from headrace.app.output.sanitise import sanitise
from headrace.app.output.trace_file import TracedSequence, TraceSpan, prefill_spans, trace
from headrace.app.versions import versions
from headrace.models.loading.load import LoadedModel
from headrace.runtime import ops
from headrace.runtime.machine.bandwidth import read_hourly
from headrace.runtime.machine.compute import cached_compute
from headrace.runtime.machine.energy import TokenEnergy, idle_watts, per_token
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import Peak, age_s, cached_peak, correct_peak
from headrace.runtime.metrics.cost import StepLimit, step_limit
from headrace.runtime.metrics.telemetry import MBU, Percentiles, Summary, in_milliseconds, mbu
from headrace.runtime.metrics.units import format_bytes, format_joules, percent, report_rate, report_seconds


class RunReport(Struct, frozen=True):
    """A finished answer, with the model and the machine that gave it.

    load_s: seconds from the search for the model until it was loaded.
    session: id of the stored conversation; None if it is not stored.
    sampling_source: origin of the temperature.
    peak: the machine's measured peak.
    memory_now: its newest reading, of the last hour.
    compute_flops: its measured FLOP/s; None if not measured.
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
        if not pasts:
            return self.summary.prompt_tokens - 1
        return round(sum(pasts) / len(pasts))

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
        slowed_by = ""
        if self.without_kernels:
            slowed_by = "stock MLX runs instead of headrace's CPU kernels (see `headrace doctor`)"
        elif self.busy:
            slowed_by = self.other_programs
        figures = StepFigures(
            step_bytes=summary.mean_step_bytes or self.step_bytes,
            step_s=summary.step_s,
            peak_gb_s=self.peak.gb_s,
            step_flops=self.step_flops,
            compute_flops=self.compute_flops,
            slowed_by=slowed_by,
            ranks=len(self.model.ranks) or 1,
        )
        if not summary.step_s or not summary.tpot_s:
            return figures
        return replace(
            figures,
            tokens=summary.step_s / summary.tpot_s,
            proposed=summary.proposed,
            accepted=summary.accepted,
            step_flops=self.step_flops * (1 + summary.proposed / max(summary.steps, 1)),
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
    def other_programs(self) -> str:
        """The programs that slowed the answer down, in words."""
        if self.answer.cpu_use is None:
            return CPU_BUSY
        return cpu_phrase(self.answer.cpu_use, "used")

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
        energy=_answer_energy(answer),
    )


def _answer_energy(answer: Answer) -> TokenEnergy | None:
    """Return the energy per token of an answer, net of the machine's idle power, measured now (under a second)."""
    if answer.energy is None or answer.sensors is None:
        return None
    tokens = sum(record.tokens for record in answer.records[1:])
    return per_token([answer.energy], tokens, idle_watts(answer.sensors))


# Ends other than by the model, in the closing line; a stop string counts as the model's.
_CUT_SHORT = {"max_tokens": "token limit", "context_limit": "context limit", "cancelled": "stopped"}


def print_report(report: RunReport, arguments: RunArguments) -> None:
    """Print the report in the form that the arguments ask for."""
    if arguments.as_json:
        print_json(document(report, with_steps=arguments.with_steps))
    if arguments.stats:
        rows = table(report)
        width = max(len(label) for label, _ in rows)
        say("\n".join(f"{label:<{width}}  {value}" for label, value in rows), err=True)
    elif sys.stderr.isatty() and not arguments.quiet:
        click.echo(dimmed(sanitise(summary_line(report)), err=True), err=True)
    if arguments.explain:
        say(sentence(report.figures), err=True)
    if arguments.trace is not None:
        write_output(arguments.trace, json.dumps(run_trace(report)) + "\n")


def run_trace(report: RunReport) -> dict[str, object]:
    """Return the trace-event document of the answer."""
    answer = report.answer
    summary = report.summary
    tokenized = summary.tokenize_s
    admitted = tokenized + summary.queue_s
    before = [TraceSpan("tokenize", 0.0, tokenized), TraceSpan("wait", tokenized, admitted)]
    start = admitted + summary.prefill_s
    chunks = [(min(start, max(admitted, end)), done) for end, done in answer.chunks]
    spans = [span for span in [*before, *prefill_spans(admitted, chunks)] if span.end_s > span.start_s]
    about = {"model": report.model.name, "device": report.machine.device_name, **report.versions}
    return trace([TracedSequence("answer", spans, start, answer.records)], report.mbu.base_gb_s, about)


def document(report: RunReport, *, with_steps: bool) -> dict[str, object]:
    """Return the `--json` document. Absent figures (one token has no inter-token latency) are null."""
    summary = report.summary
    answer = report.answer
    content: dict[str, object] = {
        "model": report.model.name,
        "session": report.session,
        "text": answer.text,
        "tokens": [token for step in answer.steps for token in step.tokens],
        "finish_reason": answer.end.reason,
        "ended_by": answer.end.ended_by,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.reused_tokens,
        "completion_tokens": summary.completion_tokens,
        **named_figures(summary, "decode_steps", "proposed_tokens", "accepted_tokens"),
        "context_limit": report.model.context_limit,
        "load_s": report.load_s,
        **named_figures(
            summary, "ttft_s", "tokenize_s", "prefill_s", "first_step_s", "prefill_tokens_per_second", "tpot_s"
        ),
        **named_figures(summary, "decode_tokens_per_second", "itl_ms", "step_ms"),
        "weight_bytes_per_step": summary.weight_bytes_per_step,
        "kv_format": report.model.kv.name if report.model.kv else None,
        "activations": report.model.activations,
        "kv_bytes_per_token": summary.kv_bytes_per_token,
        "kv_cache_bytes": summary.kv_cache_bytes,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "achieved_bandwidth_gb_s": summary.achieved_gb_s,
        "memory_gb_s": report.memory_now.gb_s,
        "measured_peak_gb_s": report.peak.gb_s,
        "measured_peak": asdict(report.peak),
        "nominal_peak_gb_s": report.nominal_peak_gb_s,
        "mbu": report.mbu.share,
        "busy": report.busy,
        "other_cpus": report.answer.cpu_use.other_cpus if report.answer.cpu_use else None,
        "measured_compute_gflop_s": report.compute_flops / 1e9 if report.compute_flops else None,
        "roofline_tokens_per_second": report.roofline_tokens_per_second,
        "limited_by": report.limit.roof,
        "arithmetic_intensity": report.arithmetic_intensity,
        "energy_per_token": asdict(report.energy) if report.energy else None,
        "explanation": sentence(report.figures),
        "sampling": answer.sampling(),
        "sampling_source": report.sampling_source,
        "device": _device(report),
        "versions": report.versions,
    }
    if answer.steps and answer.steps[0].logprobs is not None:
        content["logprobs"] = _logprobs(answer)
    if with_steps:
        content["steps"] = [
            {**asdict(record), "achieved_bandwidth_gb_s": record.achieved_gb_s} for record in answer.records
        ]
    return content


def _logprobs(answer: Answer) -> list[dict[str, object]]:
    """Return the log probability of each token and of the likeliest in its place."""
    values = [values for step in answer.steps for values in step.logprobs or ()]
    return [
        {
            "chosen": value.chosen,
            "text": token.text,
            "top": value.top,
            "top_texts": [text for text, _ in token.top],
        }
        for value, token in zip(values, answer.reports, strict=True)
    ]


def _device(report: RunReport) -> dict[str, object]:
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
    shown = None if report.without_kernels else report.mbu.share
    busy = report.busy and not report.without_kernels
    rate = summary.decode_tokens_per_second
    parts = phrases(summary.completion_tokens, rate, summary.ttft_s, shown, busy=busy)
    if summary.accepted:
        # After tokens and speed, which come first in `phrases`.
        parts.insert(2, f"{summary.completion_tokens / summary.steps:.2f} tok/step")
    elif shown is not None:  # there is no room for both
        parts[-1] += f" of {report.mbu.base_gb_s:.0f} GB/s"
    if report.without_kernels:
        parts.append("slow: see doctor")
    parts.append(sampling_text(asdict(report.answer.request.sampling), short=True))
    if report.answer.end.reason != "stop":
        parts.append(_CUT_SHORT[report.answer.end.ended_by])
    return " · ".join(parts)


def table(report: RunReport) -> list[tuple[str, str]]:
    """Return all figures as (label, value) rows, for `--stats`."""
    summary = report.summary
    answer = report.answer
    prompt = f"{summary.prompt_tokens} tokens"
    if summary.reused_tokens:
        prompt += f", {summary.reused_tokens} cached"
    rows = [
        ("model", f"{report.model.name} ({report.model.kind} decoder, {report.kernels.get('kernels', '?')} kernels)"),
        ("device", f"{report.machine.device_name} ({report.machine.backend})"),
        ("sampling", sampling_phrase(answer.request.sampling, report.sampling_source)),
        ("finish reason", f"{answer.end.reason} ({answer.end.ended_by.replace('_', ' ')})"),
        ("prompt", prompt),
        ("completion", f"{summary.completion_tokens} tokens in {summary.steps} steps"),
        ("load", f"{report.load_s:.3f} s"),
        ("TTFT", report_seconds(summary.ttft_s)),
        ("  tokenize", report_seconds(summary.tokenize_s)),
        ("  prefill", _prefill(report)),
        ("  first step", report_seconds(summary.first_step_s)),
        ("decode", f"{report_rate(summary.decode_tokens_per_second, 'tok/s')}, TPOT {report_seconds(summary.tpot_s)}"),
        ("ITL", _itl(summary.itl)),
        ("draft tokens", _drafts(summary)),
        ("weights per step", format_bytes(summary.weight_bytes_per_step)),
        ("KV cache", f"{_kv(report)}, {format_bytes(summary.kv_bytes_per_token)} per token"),
        ("peak memory", f"{format_bytes(summary.peak_memory_bytes)} (MLX)"),
        ("achieved", f"{report_rate(summary.achieved_gb_s, 'GB/s')} (computed from shapes)"),
        ("memory now", f"{report_rate(report.memory_now.gb_s, 'GB/s')}, read {_ago(report.memory_now)}"),
        ("measured peak", f"{report_rate(report.peak.gb_s, 'GB/s')} ({report.peak.source}, {report.peak.measured_at})"),
        ("nominal peak", report_rate(report.nominal_peak_gb_s, "GB/s")),
        ("MBU", _mbu(report)),
    ]
    roofline = report.roofline_tokens_per_second
    unit = "steps/s" if summary.accepted else "tok/s"
    size = format_bytes(report.step_bytes)
    roof = report.limit.roof
    rows.append(("roofline", f"{roofline:.1f} {unit} at {size} per step, by {roof}"))
    rows.append(("intensity", f"{report.arithmetic_intensity:.2f} FLOPs per byte"))
    if report.model.ranks:
        rows.append(("ranks", f"{len(report.model.ranks)}; bytes, bandwidth, roofline and memory are those of rank 0"))
    if report.energy:
        rows.append(("energy", _energy(report.energy)))
    return [(name, value) for name, value in rows if value]


def _energy(energy: TokenEnergy) -> str:
    """Return the energy per token net of idle power, or the whole of it where that is unknown."""
    parts = f"{energy.watts:.1f} W of {energy.parts}"
    if energy.joules is None or energy.idle_watts is None:
        return f"{format_joules(energy.whole_joules)} per token with idle power ({parts})"
    return f"{format_joules(energy.joules)} per token net of {energy.idle_watts:.1f} W idle ({parts})"


def _prefill(report: RunReport) -> str:
    """Return the prefill's time and speed, and the bits of activations if they are not 16."""
    summary = report.summary
    bits = report.model.activations
    text = f"{report_seconds(summary.prefill_s)}, {report_rate(summary.prefill_tokens_per_second, 'tok/s')}"
    if bits != 16:
        text += f", activations in {bits} bits"
    return text


def _kv(report: RunReport) -> str:
    """Return the cache's size, and its format if packed."""
    size = format_bytes(report.summary.kv_cache_bytes)
    kv = report.model.kv
    if kv is None or not kv.packed:
        return size
    return f"{size} as {kv.name}"


def _ago(reading: Peak) -> str:
    minutes = round(age_s(reading) / 60)
    if not minutes:
        return "just now"
    return f"{minutes} min ago"


def _mbu(report: RunReport) -> str:
    if report.busy:
        text = f"busy: {report.other_programs}"
        if report.answer.cpu_use is not None:
            text += " during the answer"
        return text
    mbu = report.mbu
    if mbu.share is None:
        return "unknown"
    base = "the measured peak"
    if mbu.measured_beside:
        base = "memory now"
    return f"{percent(mbu.share, 1)} of {base}"


def _itl(itl: Percentiles | None) -> str:
    if itl is None:
        return "needs two tokens"
    return " ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in in_milliseconds(itl).items())


def _drafts(summary: Summary) -> str:
    """Return the share of accepted draft tokens; "" without any."""
    if not summary.proposed:
        return ""
    share = summary.accepted / summary.proposed
    per_step = summary.completion_tokens / summary.steps
    return f"{summary.accepted} of {summary.proposed} accepted ({percent(share)}), {per_step:.2f} tokens per step"
