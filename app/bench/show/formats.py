"""A run's document as text: Markdown, CSV, JSON lines, and the lines shared by all views."""

import json
from typing import Any

from headrace.app.answer.sentence import sentence
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.phrases import (
    bracketed,
    energy_cell,
    energy_line,
    interval,
    profile_lines,
    spread,
    step_figures,
)
from headrace.app.output.document import Document, csv_table, flat, markdown_table
from headrace.app.output.figures import decimals, percent
from headrace.runtime.metrics.units import format_bytes

_SHOWN_DRAFTS = (1, 2, 4, 7, 15)
# Figures with parts that not every test has.
_INTERVAL = ("mean", "low", "high")
_NESTED = {
    "ttft_ms": ("mean", "median", "low", "high"),
    "mbu_paired": _INTERVAL,
    "energy_per_token": ("joules", "whole_joules", "watts", "idle_watts", "parts"),
    "arrival": (
        "itl_p95_before_ms",
        "itl_p95_ms",
        *(f"itl_p95_ratio.{name}" for name in _INTERVAL),
        "ttft_alone_ms",
        *(f"of_speed_alone.{name}" for name in _INTERVAL),
    ),
    "speculation": (
        "workload",
        "kind",
        "temperature",
        *(f"{key}.{name}" for key in ("plain_tokens_per_second", "ratio") for name in ("median", "low", "high")),
        "proposed",
        "accepted",
        "acceptance",
        "chance",
        "proposed_per_step",
        "accepted_per_step",
        "tokens_per_step",
        "sources",
        "same_tokens",
    ),
}


def markdown(document: Document) -> str:
    """Return tables and the circumstances, to paste into an issue."""
    several = len(_engines(document)) > 1
    together = any(entry.get("batch", 1) > 1 for entry in document["results"])
    workloads = [entry for entry in document["results"] if entry.get("speculation")]
    others = [entry for entry in document["results"] if not entry.get("speculation")]
    energy = bool(energy_line(document))
    tables = [
        [_markdown_row(entry, several=several, together=together, energy=energy) for entry in others],
        [_workload_row(entry, several=several) for entry in workloads],
    ]
    lines: list[str] = []
    for rows in tables:
        if rows:
            lines += [*markdown_table(list(rows[0]), [list(row.values()) for row in rows]), ""]
    return "\n".join([*lines, *(f"- {line}" for line in circumstances(document))])


def circumstances(document: Document) -> list[str]:
    """Return lines on machine, model, versions, step cost, ratios and notes."""
    device, model = document["device"], document["model"]
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
    measured, nominal = device["measured_peak"], device["nominal_peak_gb_s"]
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
    return f"{line}, off by at most {fit['largest_residual']:.1%} at {len(fit['points'])} points"


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
    several, step = scaled["speedup"], scaled["step_time"]
    return (
        f"{label(scaled)} ({scaled['engine']}): {several['mean']:.2f}x of one sequence{bracketed(several)}, "
        f"a step takes {step['mean']:.2f}x{bracketed(step)}"
    )


def arrivals(document: Document) -> list[Document]:
    """Return the tests in which a prompt joins others."""
    return [entry for entry in document["results"] if entry.get("arrival")]


def arrival_line(entry: Document) -> str:
    """Format an arrival: `... : ITL p95 9.1 to 18.0 ms, 1.98x (1.90 to 2.10); ...`."""
    found, speed = entry["arrival"], entry["tokens_per_second"]["mean"]
    stretch, share = found["itl_p95_ratio"], found["of_speed_alone"]
    return (
        f"{label(entry)} ({entry['engine']}): ITL p95 from {found['itl_p95_before_ms']:.1f} to "
        f"{found['itl_p95_ms']:.1f} ms while it joins, {stretch['mean']:.2f}x{bracketed(stretch)}; "
        f"prefill {speed:.0f} tok/s, {share['mean']:.0%} of its speed alone{bracketed(share, percent)}"
    )


def speculation_lines(document: Document) -> list[str]:
    """Return lines on the cost of speculation and on changed tokens, if workloads were measured."""
    costs, identity = document.get("run_costs"), document.get("identity")
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
    return "never" if row["break_even"] is None else f"from {row['break_even']:.0%}"


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
    device = {f"device.{key}": document["device"][key] for key in ("name", "backend", "measured_peak_gb_s")}
    skipped = ("repetitions", "samples", "notes")
    rows = [
        {
            "created": document["created"],
            **device,
            **flat({k: _parts(k, v) for k, v in entry.items() if k not in skipped}),
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


def gain_interval(entry: Document) -> str:
    """Format the interval of a workload's gain: `1.95–2.10`."""
    return interval(entry["speculation"]["ratio"], decimals, "–")


def _workload_row(entry: Document, *, several: bool) -> dict[str, str]:
    found, speed = entry["speculation"], entry["tokens_per_second"]
    return {
        **({"engine": entry["engine"]} if several else {}),
        "model": entry["model"],
        "workload": label(entry),
        "kind": found["kind"],
        "tok/s": decimals(speed["median"]),
        "without": decimals(found["plain_tokens_per_second"]["median"]),
        "gain (95 %)": f"{found['ratio']['median']:.2f}x{bracketed(found['ratio'])}",
        "accepted": percent(found["acceptance"]) or "–",
        "accepted per step": decimals(found["accepted_per_step"]),
        "tokens per step": decimals(found["tokens_per_step"]),
        "same tokens": "yes" if found["same_tokens"] else "no",
    }


def _parts(key: str, value: Any) -> Any:
    """Give a figure its parts, also where it is null."""
    return dict.fromkeys(_NESTED[key]) if value is None and key in _NESTED else value


def _digest(model: Document) -> str:
    """Return the hash of the model's file, or else of its headers."""
    whole = model.get("sha256")
    return f"{whole[:12]}" if whole else f"{str(model.get('headers_sha256'))[:12]} (headers)"


def shown_mbu(entry: Document) -> float | None:
    """Return MBU against the memory speed around each repetition, or else against the run's peak."""
    paired: float | None = (entry["mbu_paired"] or {}).get("mean")
    peak: float | None = entry["mbu"]
    return peak if paired is None else paired


def mbu_cell(entry: Document) -> str:
    """Format `shown_mbu`: `83 %`, or `busy` if other programs slowed the test down."""
    return "busy" if entry.get("busy") else percent(shown_mbu(entry))


def label(entry: Document) -> str:
    return str(entry["test"]) + (f" @ d{entry['depth']}" if entry["depth"] else "")


def _engines(document: Document) -> set[tuple[str, str]]:
    return {(entry["engine"], entry["model"]) for entry in document["results"]}


def _markdown_row(entry: Document, *, several: bool, together: bool, energy: bool) -> dict[str, str]:
    speed, itl = entry["tokens_per_second"], entry["itl_ms"]
    name = {"engine": entry["engine"], "model": entry["model"]} if several else {"model": entry["model"]}
    return {
        **name,
        "test": label(entry),
        "tok/s": f"{speed['mean']:.2f}" + (f" ± {speed['sd']:.2f}" if spread(speed) is not None else ""),
        "median (95 %)": f"{speed['median']:.2f}{bracketed(speed)}",
        **({"tok/s each": decimals(entry["tokens_per_second_each"])} if together else {}),
        "ITL p50 / p95 / p99 / max ms": " / ".join(decimals(itl[key]) for key in ("p50", "p95", "p99", "max")),
        "TTFT ms": decimals((entry["ttft_ms"] or {}).get("median"), 1),
        "GB/s": decimals(entry["achieved_bandwidth_gb_s"], 1),
        "MBU": mbu_cell(entry),
        "roofline tok/s": decimals(entry["roofline_tokens_per_second"], 0),
        "FLOP/byte": decimals(entry["arithmetic_intensity"]),
        **({"J/token": energy_cell(entry)} if energy else {}),
        "peak memory": format_bytes(entry["peak_memory_bytes"]) if entry["peak_memory_bytes"] else "",
    }
