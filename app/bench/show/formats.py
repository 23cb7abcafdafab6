"""A run's document as Markdown and JSON lines, and the lines shared by all views.

The terminal (`terminal_views.py`) and the HTML report show the same lines; tables are in `columns.py`.

Guards: tests/app/bench/test_views.py and tests/app/cli/test_bench.py.
"""

from headrace.app.answer.sentence import sentence
from headrace.app.bench.measure.records import (
    Device,
    DraftCost,
    Identity,
    Interval,
    KVRatio,
    ModelEntry,
    Ratio,
    Result,
    RunCosts,
    RunDocument,
    Scaling,
)
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.columns import markdown_tables
from headrace.app.bench.show.phrases import (
    above_one,
    below_one,
    bracketed,
    energy_line,
    label,
    profile_lines,
    step_figures,
)
from headrace.app.predict.step_cost_fit import StepCostFit
from headrace.runtime.metrics.units import counted, format_bytes, percent

_SHOWN_DRAFTS = (1, 2, 4, 7, 15)  # of DRAFT_LENGTHS: one line has room for no more


def markdown(document: RunDocument) -> str:
    """Return tables and the circumstances, to paste into an issue."""
    return "\n".join([*markdown_tables(document.results), *(f"- {line}" for line in circumstances(document))])


def circumstances(document: RunDocument) -> list[str]:
    """Return lines on machine, model, versions, step cost, ratios and notes."""
    device = document.device
    lines = [f"{device.name}, {device.backend}, {device.kernels_name} kernels; {device.os}"]
    for model in document.all_models:
        lines.append(f"{model_line(model)}; sha256 {_digest(model)}")
    lines += map(setup_line, document.engines)
    lines += [peak_line(device), energy_line(document), explanation_line(document)]
    lines += [line for _, line, _ in labelled_lines(document)]
    if document.profile is not None:
        lines += profile_lines(document.profile)
    lines += document.notes
    lines.append(", ".join(f"{name} {version}" for name, version in document.versions.items()))
    rounds = counted(document.rounds, "round")
    if document.interrupted:
        rounds += ", interrupted"
    lines.append(f"`{document.command}`, {rounds}, {document.created}")
    return [line for line in lines if line]


def labelled_lines(document: RunDocument) -> list[tuple[str, str, str]]:
    """Return (label, line, style) of step cost, ratios, batches, arrivals, draft tokens and equality of tokens."""
    rows = []
    if document.step_cost is not None:
        rows.append(("step", step_cost_line(document.step_cost), ""))
    rows += [("ratio", ratio_line(ratio), _ratio_style(ratio)) for ratio in document.ratios]
    rows += [("K/V", kv_ratio_line(ratio), _ratio_style(ratio)) for ratio in document.kv_ratios]
    rows += [("batch", scaling_line(scaled), "") for scaled in document.scaling]
    rows += [("arrival", arrival_line(entry), "") for entry in document.results if entry.arrival is not None]
    if document.run_costs is not None:
        rows.append(("drafts", break_even_line(document.run_costs), ""))
    if document.identity is not None:
        rows.append(("tokens", identity_line(document.identity), "bold red" if document.identity.broken else ""))
    return rows


def _ratio_style(ratio: Interval) -> str:
    """Return the colour of a ratio that differs significantly from 1."""
    if above_one(ratio):
        return "green"
    return "red" if below_one(ratio) else ""


def model_line(model: ModelEntry) -> str:
    """Describe a model: bytes read per step, and its most common format."""
    line = (
        f"{model.name}: {format_bytes(model.weight_bytes_per_step)} per step, "
        f"{format_bytes(model.kv_bytes_per_token)} of K/V per token"
    )
    formats = list(model.quantization or {})
    if not formats:
        return line
    if len(formats) > 1:
        return f"{line}, mostly {formats[0]}"
    return f"{line}, {formats[0]}"


def peak_line(device: Device) -> str:
    measured = device.measured_peak
    best = device.remembered_peak
    nominal = device.nominal_peak_gb_s
    parts = []
    if measured:
        parts.append(
            f"measured peak {measured.upper_quartile:.1f} GB/s during the run "
            f"(90 % of passes {measured.p5:.1f} to {measured.p95:.1f})"
        )
    if best and (not measured or best.gb_s > measured.upper_quartile):
        parts.append(f"best recent peak {best.gb_s:.1f} GB/s on {best.measured_at[:10]}")
    parts.append(f"nominal {nominal:.0f} GB/s" if nominal else "nominal peak unknown")
    return "; ".join(parts)


def step_cost_line(fit: StepCostFit) -> str:
    line = f"step cost: {fit.fixed_ms:.2f} ms + bytes / {fit.effective_bandwidth_gb_s:.1f} GB/s"
    if len(fit.points) == 2:
        return f"{line}, through 2 points (more depths would check it)"
    return f"{line}, off by at most {percent(fit.largest_residual, 1)} at {len(fit.points)} points"


def explanation_line(document: RunDocument) -> str:
    """Return the sentence on the first decode test; "" without one."""
    for entry in document.results:
        decode = entry.is_decode and entry.speculation is None
        if decode and entry.engine == "headrace" and entry.step_bytes is not None:
            return f"{label(entry)}: {sentence(step_figures(document, entry))}"
    return ""


def ratio_line(ratio: Ratio) -> str:
    return f"{label(ratio)}: {ratio.ratio:.2f}x {ratio.base}{bracketed(ratio)}"


def kv_ratio_line(ratio: KVRatio) -> str:
    """Format a ratio of K/V formats: `tg128 @ d4096: tiny q8 1.30x of tiny f16 (1.25 to 1.36)`."""
    return f"{label(ratio)}: {ratio.model} {ratio.ratio:.2f}x of {ratio.base}{bracketed(ratio)}"


def scaling_line(scaled: Scaling) -> str:
    """Format a batch: `tg128 x8 (headrace): 4.20x of one sequence (4.10 to 4.31), a step takes 1.90x (...)`."""
    several = scaled.speedup
    step = scaled.step_time
    return (
        f"{label(scaled)} ({scaled.engine}): {several.mean:.2f}x of one sequence{bracketed(several)}, "
        f"a step takes {step.mean:.2f}x{bracketed(step)}"
    )


def arrival_line(entry: Result) -> str:
    """Format an arrival: `... : ITL p95 9.1 to 18.0 ms, 1.98x (1.90 to 2.10); ...`."""
    arrival = entry.arrival
    assert arrival is not None, "a test in which a prompt joins others"
    speed = entry.tokens_per_second.mean
    stretch = arrival.itl_p95_ratio
    share = arrival.of_speed_alone
    return (
        f"{label(entry)} ({entry.engine}): ITL p95 from {arrival.itl_p95_before_ms:.1f} to "
        f"{arrival.itl_p95_ms:.1f} ms while it joins, {stretch.mean:.2f}x{bracketed(stretch)}; "
        f"prefill {speed:.0f} tok/s, {percent(share.mean)} of its speed alone{bracketed(share, percent)}"
    )


def break_even_line(costs: RunCosts) -> str:
    """Format the acceptance rates from which draft tokens pay, by draft length."""
    parts = [
        f"{counted(row.guesses, 'draft token')} {row.cost:.2f}x a step, {_break_even(row)}"
        for row in costs.guesses
        if row.guesses in _SHOWN_DRAFTS
    ]
    return f"break-even by acceptance rate: {'; '.join(parts)}"


def _break_even(row: DraftCost) -> str:
    if row.break_even is None:
        return "never"
    return f"from {percent(row.break_even)}"


def identity_line(identity: Identity) -> str:
    """Report whether answers with and without speculation were equal, and whether they must be."""
    if not identity.differs:
        return f"speculation changed no token in any of {identity.tests} tests"
    line = f"speculation changed tokens in {len(identity.differs)} of {identity.tests} tests"
    if broken := identity.broken:
        return f"{line}, which must not happen: {', '.join(broken)}"
    reasons = dict.fromkeys(expected.reason for expected in identity.expected.values())
    return f"{line} ({'; '.join(reasons)})"


def _digest(model: ModelEntry) -> str:
    """Return the hash of the model's file, or else of its headers."""
    if model.sha256:
        return model.sha256[:12]
    return f"{str(model.headers_sha256)[:12]} (headers)"
