"""Result tables for terminals of 40 columns and more.

Made from entries of the JSON document, so running, finished and saved runs look alike.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.app.bench.show.formats import gain_interval, label, percent, shown_mbu
from headrace.app.output.tables import Cell, Column, table_lines
from headrace.runtime.metrics.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

Entry = dict[str, Any]
_BAR = 6


def results_table(results: Sequence[Entry], width: int) -> "Group":
    """Return all tests, a table per engine and model; columns by importance up to `width`."""
    from rich.console import Group
    from rich.text import Text

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


def mbu_bar(value: float | None) -> "Text":
    """Draw the share of memory bandwidth used. Red: very little, or more than the peak."""
    from rich.text import Text

    if value is None:
        return Text("")
    filled = max(0, min(_BAR, round(value * _BAR)))
    style = "red" if value > 1 or value < 0.25 else "yellow" if value < 0.5 else "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "dim"))


def speed_text(value: float | None) -> str:
    """Format a speed with three significant digits, from 0.5 to 50,000."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _columns(results: Sequence[Entry]) -> list[Column]:
    """Return the columns of one engine and model, with their priorities when narrow."""

    def column(name: str, leaves: int, cell: Callable[[Entry], Cell], *, right: bool = True) -> Column:
        return Column(name, [cell(entry) for entry in results], leaves, right)

    return [
        column("test", 0, label, right=False),
        column("tok/s", 0, _speed),
        column("each", 2, _each),
        column("± sd", 5, lambda entry: speed_text(entry["tokens_per_second"]["sd"])),
        column("95 %", 6, _interval),
        column("p50 ms", 2, _itl("p50")),
        column("p95", 8, _itl("p95")),
        column("p99", 3, _itl("p99")),
        column("max", 10, _itl("max")),
        column("TTFT ms", 4, lambda entry: speed_text((entry["ttft_ms"] or {}).get("median"))),
        column("GB/s", 4, lambda entry: speed_text(entry["achieved_bandwidth_gb_s"])),
        column("MBU", 1, lambda entry: percent(shown_mbu(entry))),
        column("", 7, lambda entry: mbu_bar(shown_mbu(entry))),
        column("roofline", 9, lambda entry: speed_text(entry["roofline_tokens_per_second"])),
        column("FLOP/B", 11, lambda entry: speed_text(entry["arithmetic_intensity"])),
        column("memory", 12, _memory),
        column("drift", 13, lambda entry: "" if entry["drift"] is None else f"{entry['drift']:+.0%}"),
    ]


def _workload_columns(results: Sequence[Entry]) -> list[Column]:
    """Return the columns of workloads: gain and accepted draft tokens."""

    def column(name: str, leaves: int, cell: Callable[[Entry], Cell], *, right: bool = True) -> Column:
        return Column(name, [cell(entry) for entry in results], leaves, right)

    return [
        column("workload", 0, label, right=False),
        column("kind", 7, lambda entry: str(entry["speculation"]["kind"]), right=False),
        column("tok/s", 0, lambda entry: speed_text(entry["tokens_per_second"]["median"])),
        column("without", 2, lambda entry: speed_text(entry["speculation"]["plain_tokens_per_second"]["median"])),
        column("gain", 0, _gain),
        column("95 %", 1, gain_interval),
        column("accepted", 3, lambda entry: percent(entry["speculation"]["acceptance"]) or "–"),
        column("tok/step", 4, lambda entry: f"{entry['speculation']['tokens_per_step']:.2f}"),
        column("guessed/step", 8, lambda entry: f"{entry['speculation']['proposed_per_step']:.2f}"),
        column("p50 ms", 9, _itl("p50")),
        column("GB/s", 10, lambda entry: speed_text(entry["achieved_bandwidth_gb_s"])),
        column("same", 5, lambda entry: "✓" if entry["speculation"]["same_tokens"] else "✗"),
    ]


def _gain(entry: Entry) -> "Text":
    """Format the gain: green if significantly faster, red if slower."""
    from rich.text import Text

    ratio = entry["speculation"]["ratio"]
    style = "bold green" if ratio["low"] > 1 else "bold red" if ratio["high"] < 1 else "bold"
    return Text(f"{ratio['median']:.2f}x", style=style)


def _speed(entry: Entry) -> "Text":
    from rich.text import Text

    return Text(speed_text(entry["tokens_per_second"]["mean"]), style="bold")


def _each(entry: Entry) -> str:
    """Return the speed per sequence, if several decode together."""
    return speed_text(entry.get("tokens_per_second_each")) if entry.get("batch", 1) > 1 else ""


def _interval(entry: Entry) -> str:
    speed = entry["tokens_per_second"]
    return f"{speed_text(speed['low'])}–{speed_text(speed['high'])}"


def _itl(key: str) -> Callable[[Entry], str]:
    return lambda entry: speed_text(entry["itl_ms"][key])


def _memory(entry: Entry) -> str:
    return format_bytes(entry["peak_memory_bytes"]) if entry["peak_memory_bytes"] else ""
