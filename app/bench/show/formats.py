"""A run's document as text: Markdown, CSV, JSON lines, and the lines shared by all views."""

import json
from collections.abc import Sequence

from headrace.app.answer.sentence import sentence
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.columns import RESULT_COLUMNS, WORKLOAD_COLUMNS, ResultColumn
from headrace.app.bench.show.phrases import bracketed, energy_line, label, profile_lines, step_figures
from headrace.app.output.document import Document, csv_table, markdown_table
from headrace.runtime.metrics.units import format_bytes, percent

_SHOWN_DRAFTS = (1, 2, 4, 7, 15)


def markdown(document: Document) -> str:
    """Return tables and the circumstances, to paste into an issue."""
    results = document["results"]
    workloads = [entry for entry in results if entry.get("speculation")]
    others = [entry for entry in results if not entry.get("speculation")]
    lines: list[str] = []
    if others:
        test = ResultColumn(cell=label, markdown="test")
        lines += [*_markdown_table(results, others, [test, *RESULT_COLUMNS]), ""]
    if workloads:
        lines += [*_markdown_table(results, workloads, WORKLOAD_COLUMNS), ""]
    return "\n".join([*lines, *(f"- {line}" for line in circumstances(document))])


def _markdown_table(
    results: Sequence[Document], shown: Sequence[Document], columns: Sequence[ResultColumn]
) -> list[str]:
    """Return the lines of a table of some of the results; engines are named if there are several."""
    engines = {(entry["engine"], entry["model"]) for entry in results}
    names = ("engine", "model") if len(engines) > 1 else ("model",)
    columns = [*(ResultColumn(name, markdown=name) for name in names), *columns]
    columns = [column for column in columns if column.is_in_markdown(results)]
    rows = [[column.markdown_cell(entry) for column in columns] for entry in shown]
    return markdown_table([str(column.markdown) for column in columns], rows)


def circumstances(document: Document) -> list[str]:
    """Return lines on machine, model, versions, step cost, ratios and notes."""
    device = document["device"]
    model = document["model"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return [
        f"{device['name']}, {device['backend']}, {device['kernels'].get('kernels', '?')} kernels; {device['os']}",
        *(f"{model_line(entry)}; sha256 {_digest(entry)}" for entry in document.get("models") or [model]),
        *(setup_line(setup) for setup in document.get("engines") or []),
        peak_line(device),
        *([energy] if (energy := energy_line(document)) else []),
        *([line] if (line := explanation_line(document)) else []),
        *([step_cost_line(document["step_cost"])] if document["step_cost"] else []),
        *(ratio_line(ratio) for ratio in document["ratios"]),
        *map(kv_ratio_line, document.get("kv_ratios", [])),
        *map(scaling_line, document.get("scaling", [])),
        *map(arrival_line, arrivals(document)),
        *speculation_lines(document),
        *(profile_lines(document["profile"]) if document["profile"] else []),
        *document["notes"],
        versions,
        f"`{document['command']}`, {document['rounds']} round{'' if document['rounds'] == 1 else 's'}"
        + (", interrupted" if document["interrupted"] else "")
        + f", {document['created']}",
    ]


def model_line(model: Document) -> str:
    """Describe a model: bytes read per step, and its most common format."""
    formats = list(model["quantization"] or {})
    stored = f", {'mostly ' if len(formats) > 1 else ''}{formats[0]}" if formats else ""
    return (
        f"{model['name']}: {format_bytes(model['weight_bytes_per_step'])} per step, "
        f"{format_bytes(model['kv_bytes_per_token'])} of K/V per token{stored}"
    )


def peak_line(device: Document) -> str:
    measured = device["measured_peak"]
    nominal = device["nominal_peak_gb_s"]
    parts = []
    if measured:
        parts.append(
            f"measured peak {measured['upper_quartile']:.1f} GB/s during the run "
            f"(90 % of passes {measured['p5']:.1f} to {measured['p95']:.1f})"
        )
    if (best := device.get("remembered_peak")) and (not measured or best["gb_s"] > measured["upper_quartile"]):
        parts.append(f"best recent peak {best['gb_s']:.1f} GB/s on {best['measured_at'][:10]}")
    parts.append(f"nominal {nominal:.0f} GB/s" if nominal else "nominal peak unknown")
    return "; ".join(parts)


def step_cost_line(fit: Document) -> str:
    line = f"step cost: {fit['fixed_ms']:.2f} ms + bytes / {fit['effective_bandwidth_gb_s']:.1f} GB/s"
    if len(fit["points"]) == 2:
        return f"{line}, through 2 points (more depths would check it)"
    return f"{line}, off by at most {percent(fit['largest_residual'], 1)} at {len(fit['points'])} points"


def explanation_line(document: Document) -> str:
    """Return the sentence on the first decode test; "" without one."""
    for entry in document["results"]:
        decode = entry["generated_tokens"] and not entry["prompt_tokens"] and not entry.get("speculation")
        if decode and entry["engine"] == "headrace" and entry["kv_bytes_per_step"] is not None:
            return f"{label(entry)}: {sentence(step_figures(document, entry))}"
    return ""


def ratio_line(ratio: Document) -> str:
    return f"{label(ratio)}: {ratio['ratio']:.2f}x {ratio['peer']}{bracketed(ratio)}"


def kv_ratio_line(ratio: Document) -> str:
    """Format a ratio of K/V formats: `tg128 @ d4096: tiny q8 1.30x of tiny f16 (1.25 to 1.36)`."""
    return f"{label(ratio)}: {ratio['model']} {ratio['ratio']:.2f}x of {ratio['over']}{bracketed(ratio)}"


def scaling_line(scaled: Document) -> str:
    """Format a batch against one sequence: `tg128 x8: 4.20x of one (4.10 to 4.31), a step takes 1.90x`."""
    several = scaled["speedup"]
    step = scaled["step_time"]
    return (
        f"{label(scaled)} ({scaled['engine']}): {several['mean']:.2f}x of one sequence{bracketed(several)}, "
        f"a step takes {step['mean']:.2f}x{bracketed(step)}"
    )


def arrivals(document: Document) -> list[Document]:
    """Return the tests in which a prompt joins others."""
    return [entry for entry in document["results"] if entry.get("arrival")]


def arrival_line(entry: Document) -> str:
    """Format an arrival: `... : ITL p95 9.1 to 18.0 ms, 1.98x (1.90 to 2.10); ...`."""
    arrival = entry["arrival"]
    speed = entry["tokens_per_second"]["mean"]
    stretch = arrival["itl_p95_ratio"]
    share = arrival["of_speed_alone"]
    return (
        f"{label(entry)} ({entry['engine']}): ITL p95 from {arrival['itl_p95_before_ms']:.1f} to "
        f"{arrival['itl_p95_ms']:.1f} ms while it joins, {stretch['mean']:.2f}x{bracketed(stretch)}; "
        f"prefill {speed:.0f} tok/s, {percent(share['mean'])} of its speed alone{bracketed(share, percent)}"
    )


def speculation_lines(document: Document) -> list[str]:
    """Return lines on the cost of speculation and on changed tokens, if workloads were measured."""
    costs = document.get("run_costs")
    identity = document.get("identity")
    return [*([break_even_line(costs)] if costs else []), *([identity_line(identity)] if identity else [])]


def break_even_line(costs: Document) -> str:
    """Format the acceptance rates from which draft tokens pay, by draft length."""
    shown = [row for row in costs["guesses"] if row["guesses"] in _SHOWN_DRAFTS]
    parts = [
        f"{row['guesses']} draft token{'s' if row['guesses'] > 1 else ''} {row['cost']:.2f}x a step, {_break_even(row)}"
        for row in shown
    ]
    return f"break-even by acceptance rate: {'; '.join(parts)}"


def _break_even(row: Document) -> str:
    return "never" if row["break_even"] is None else f"from {percent(row['break_even'])}"


def identity_line(identity: Document) -> str:
    """Report whether answers with and without speculation were equal, and whether they must be."""
    if not identity["differs"]:
        return f"speculation changed no token in any of {identity['tests']} tests"
    line = f"speculation changed tokens in {len(identity['differs'])} of {identity['tests']} tests"
    if broken := identity["broken"]:
        return f"{line}, which must not happen: {', '.join(broken)}"
    reasons = dict.fromkeys(expected["reason"] for expected in identity["expected"].values())
    return f"{line} ({'; '.join(reasons)})"


def csv_text(document: Document) -> str:
    """Return one row per test, nested figures as `itl_ms.p50`, with the machine in every row.

    The columns are always the same; absent figures are empty cells.
    """
    shared = {
        "created": document["created"],
        **{f"device.{key}": document["device"][key] for key in ("name", "backend", "measured_peak_gb_s")},
    }
    rows = [
        {
            **shared,
            **{column.key: column.csv_cell(entry) for column in RESULT_COLUMNS if column.key},
            "samples": " ".join(f"{value:.6g}" for value in entry["samples"]),
        }
        for entry in document["results"]
    ]
    return csv_table(rows)


def json_lines(document: Document) -> str:
    """Return one line per test, each with machine, model and versions."""
    models = {model["name"]: model for model in document.get("models") or [document["model"]]}
    shared = {key: document[key] for key in ("schema", "created", "command", "device", "versions")}
    return "\n".join(
        json.dumps({**shared, "model_facts": models.get(entry["model"]), **entry}) for entry in document["results"]
    )


def _digest(model: Document) -> str:
    """Return the hash of the model's file, or else of its headers."""
    whole = model.get("sha256")
    return f"{whole[:12]}" if whole else f"{str(model.get('headers_sha256'))[:12]} (headers)"
