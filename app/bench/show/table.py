"""The results as people see them on a terminal: tables that fit 80 columns and say more on wider ones.

Made from entries of the JSON document, so a run in progress, a finished one and a saved one look alike.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.app.bench.show.formats import label
from headrace.runtime.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

Entry = dict[str, Any]
_BAR = 6


def results_table(results: Sequence[Entry], width: int) -> "Group":
    """All tests, a table for every engine and model; columns by importance until `width` is used up."""
    from rich.console import Group
    from rich.text import Text

    groups = list(dict.fromkeys((entry["engine"], entry["model"]) for entry in results))
    parts: list[Table | Text] = []
    for engine, model in groups:
        if len(groups) > 1:
            parts.append(Text.assemble("\n", (engine, "bold cyan"), (f"  {model}", "dim")))
        parts.append(
            _table([entry for entry in results if (entry["engine"], entry["model"]) == (engine, model)], width)
        )
    return Group(*parts)


def mbu_bar(value: float | None) -> "Text":
    """How much of the memory's speed was used. Red: hardly any, or more than there is, which makes no sense."""
    from rich.text import Text

    if value is None:
        return Text("")
    filled = max(0, min(_BAR, round(value * _BAR)))
    style = "red" if value > 1 or value < 0.25 else "yellow" if value < 0.5 else "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "dim"), f" {value:4.0%}")


def speed_text(value: float | None) -> str:
    """Three significant digits, so that columns stay narrow from 0.5 to 50,000."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _table(results: Sequence[Entry], width: int) -> "Table":
    from rich import box
    from rich.table import Table

    shown = [column for column in _COLUMNS if width >= column[1]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("test", no_wrap=True, min_width=max(len(label(entry)) for entry in results))
    for name, _, _ in shown:
        table.add_column(name, justify="left" if name == "MBU" else "right", no_wrap=True)
    for entry in results:
        table.add_row(label(entry), *(cell(entry) for _, _, cell in shown))
    return table


def _speed(entry: Entry) -> "Text":
    from rich.text import Text

    speed = entry["tokens_per_second"]
    return Text.assemble((speed_text(speed["mean"]), "bold"), (f" ± {speed_text(speed['sd'])}", "dim"))


def _interval(entry: Entry) -> str:
    speed = entry["tokens_per_second"]
    return f"{speed_text(speed['low'])}–{speed_text(speed['high'])}"


def _itl(key: str) -> Callable[[Entry], str]:
    return lambda entry: speed_text(entry["itl_ms"][key])


# column, the terminal width from which on there is room for it, its text
_COLUMNS: tuple[tuple[str, int, Callable[[Entry], Any]], ...] = (
    ("tok/s ± sd", 0, _speed),
    ("95 %", 0, _interval),
    ("p50 ms", 0, _itl("p50")),
    ("p95", 104, _itl("p95")),
    ("p99", 0, _itl("p99")),
    ("max", 120, _itl("max")),
    ("TTFT ms", 96, lambda entry: speed_text((entry["ttft_ms"] or {}).get("median"))),
    ("GB/s", 0, lambda entry: speed_text(entry["achieved_bandwidth_gb_s"])),
    ("MBU", 0, lambda entry: mbu_bar(entry["mbu"])),
    ("roofline", 112, lambda entry: speed_text(entry["roofline_tokens_per_second"])),
    ("FLOP/B", 130, lambda entry: speed_text(entry["arithmetic_intensity"])),
    ("memory", 140, lambda entry: format_bytes(entry["peak_memory_bytes"]) if entry["peak_memory_bytes"] else ""),
    ("drift", 150, lambda entry: "" if entry["drift"] is None else f"{entry['drift']:+.0%}"),
)
