"""Result tables for terminals of 40 columns and more.

Made from entries of the JSON document, so running, finished and saved runs look alike.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Group
from rich.text import Text

from headrace.app.bench.show.formats import gain_interval, label, mbu_cell, shown_mbu
from headrace.app.bench.show.phrases import above_one, below_one, energy_cell, interval, spread
from headrace.app.output.figures import percent, speed_text
from headrace.app.output.tables import Column, table_lines
from headrace.runtime.metrics.units import format_bytes

Entry = dict[str, Any]
_BAR = 6


def results_table(results: Sequence[Entry], width: int) -> Group:
    """Return all tests, a table per engine and model; columns by importance up to `width`."""
    groups = list(dict.fromkeys((entry["engine"], entry["model"]) for entry in results))
    parts: list[Text] = []
    for engine, model in groups:
        if len(groups) > 1:
            parts.append(Text.assemble("\n", (engine, "bold cyan"), (f"  {model}", "dim")))
        shown = [entry for entry in results if (entry["engine"], entry["model"]) == (engine, model)]
        workloads = [entry for entry in shown if entry.get("speculation")]
        others = [entry for entry in shown if not entry.get("speculation")]
        parts += table_lines(_columns(others), width) if others else []
        parts += [Text(), *table_lines(_workload_columns(workloads), width)] if workloads else []
    return Group(*parts)


def mbu_bar(value: float | None) -> Text:
    """Draw the share of memory bandwidth used. Red: very little, or more than the peak."""
    if value is None:
        return Text("")
    filled = max(0, min(_BAR, round(value * _BAR)))
    style = "red" if value > 1 or value < 0.25 else "yellow" if value < 0.5 else "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "dim"))


def _columns(results: Sequence[Entry]) -> list[Column]:
    """Return the columns of one engine and model, with their priorities when narrow."""

    column = partial(Column.of, results)
    return [
        column("test", label, 0, right=False),
        column("tok/s", _speed, 0),
        column("each", _each, 2),
        column("± sd", lambda entry: speed_text(spread(entry["tokens_per_second"])), 5),
        column("95 %", _interval, 6),
        column("p50 ms", _itl("p50"), 2),
        column("p95", _itl("p95"), 8),
        column("p99", _itl("p99"), 3),
        column("max", _itl("max"), 10),
        column("TTFT ms", lambda entry: speed_text((entry["ttft_ms"] or {}).get("median")), 4),
        column("GB/s", lambda entry: speed_text(entry["achieved_bandwidth_gb_s"]), 4),
        column("MBU", mbu_cell, 1),
        column("", lambda entry: mbu_bar(shown_mbu(entry)), 7),
        column("energy", energy_cell, 8),
        column("roofline", lambda entry: speed_text(entry["roofline_tokens_per_second"]), 9),
        column("FLOP/B", lambda entry: speed_text(entry["arithmetic_intensity"]), 11),
        column("memory", _memory, 12),
        column("drift", lambda entry: "" if entry["drift"] is None else f"{entry['drift']:+.0%}", 13),
    ]


def _workload_columns(results: Sequence[Entry]) -> list[Column]:
    """Return the columns of workloads: gain and accepted draft tokens."""

    column = partial(Column.of, results)
    return [
        column("workload", label, 0, right=False),
        column("kind", lambda entry: str(entry["speculation"]["kind"]), 7, right=False),
        column("tok/s", lambda entry: speed_text(entry["tokens_per_second"]["median"]), 0),
        column("without", lambda entry: speed_text(entry["speculation"]["plain_tokens_per_second"]["median"]), 2),
        column("gain", _gain, 0),
        column("95 %", gain_interval, 1),
        column("accepted", lambda entry: percent(entry["speculation"]["acceptance"]) or "–", 3),
        column("tok/step", lambda entry: f"{entry['speculation']['tokens_per_step']:.2f}", 4),
        column("drafts/step", lambda entry: f"{entry['speculation']['proposed_per_step']:.2f}", 8),
        column("p50 ms", _itl("p50"), 9),
        column("GB/s", lambda entry: speed_text(entry["achieved_bandwidth_gb_s"]), 10),
        column("same", lambda entry: "✓" if entry["speculation"]["same_tokens"] else "✗", 5),
    ]


def _gain(entry: Entry) -> Text:
    """Format the gain: green if significantly faster, red if slower."""
    ratio = entry["speculation"]["ratio"]
    style = "bold green" if above_one(ratio) else "bold red" if below_one(ratio) else "bold"
    return Text(f"{ratio['median']:.2f}x", style=style)


def _speed(entry: Entry) -> Text:
    return Text(speed_text(entry["tokens_per_second"]["mean"]), style="bold")


def _each(entry: Entry) -> str:
    """Return the speed per sequence, if several decode together."""
    return speed_text(entry.get("tokens_per_second_each")) if entry.get("batch", 1) > 1 else ""


def _interval(entry: Entry) -> str:
    return interval(entry["tokens_per_second"], speed_text, "–")


def _itl(key: str) -> Callable[[Entry], str]:
    return lambda entry: speed_text(entry["itl_ms"][key])


def _memory(entry: Entry) -> str:
    return format_bytes(entry["peak_memory_bytes"]) if entry["peak_memory_bytes"] else ""
