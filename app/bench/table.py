"""The results as people see them on a terminal: one table that fits 80 columns and says more on wider ones.

Made from entries of the JSON document, so a run in progress, a finished one and a saved one look alike.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.bench.formats import label
from runtime.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_BAR = 8
_WIDE, _WIDEST = 100, 124


def results_table(results: Sequence[dict[str, Any]], width: int) -> "Table":
    """All tests; columns by importance until `width` is used up. Decode rows carry a bar of their MBU."""
    from rich import box
    from rich.table import Table

    groups = list(dict.fromkeys((entry["engine"], entry["model"]) for entry in results))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold", expand=False)
    table.add_column("test", no_wrap=True)
    for name, least in _COLUMNS:
        if width >= least:
            table.add_column(name, justify="left" if name == "MBU" else "right", no_wrap=True)
    for group in groups:
        if len(groups) > 1:
            table.add_row(_heading(*group))
        for entry in results:
            if (entry["engine"], entry["model"]) == group:
                indent = "  " if len(groups) > 1 else ""
                cells = [_CELLS[name](entry) for name, least in _COLUMNS if width >= least]
                table.add_row(f"{indent}{label(entry)}", *cells)
    return table


# column, and the terminal width from which on there is room for it
_COLUMNS = (
    ("tok/s", 0),
    ("± sd", 0),
    ("95 % interval", 0),
    ("p50 ms", 0),
    ("p95", _WIDE),
    ("p99", 0),
    ("max", _WIDEST),
    ("TTFT ms", _WIDE),
    ("GB/s", 0),
    ("MBU", 0),
    ("roofline", _WIDE),
    ("FLOP/B", _WIDEST),
    ("memory", _WIDEST),
    ("drift", _WIDEST),
)


def mbu_bar(value: float | None) -> "Text":
    """How much of the memory's speed was used, as a bar; green from half on, because that is what good looks like."""
    from rich.text import Text

    if value is None:
        return Text("")
    filled = max(0, min(_BAR, round(value * _BAR)))
    style = "red" if value > 1 or value < 0.25 else "yellow" if value < 0.5 else "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "dim"), f" {value:4.0%}")


def speed_text(value: float | None) -> str:
    """Three to four significant digits, so that columns stay narrow from 0.5 to 50,000."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _heading(engine: str, model: str) -> "Text":
    from rich.text import Text

    return Text.assemble((engine, "bold cyan"), f" {model}")


def _interval(entry: dict[str, Any]) -> str:
    speed = entry["tokens_per_second"]
    return f"{speed_text(speed['low'])}–{speed_text(speed['high'])}"


def _itl(key: str) -> Any:
    return lambda entry: _ms(entry["itl_ms"][key])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


_CELLS: dict[str, Any] = {
    "tok/s": lambda entry: speed_text(entry["tokens_per_second"]["mean"]),
    "± sd": lambda entry: speed_text(entry["tokens_per_second"]["sd"]),
    "95 % interval": _interval,
    "p50 ms": _itl("p50"),
    "p95": _itl("p95"),
    "p99": _itl("p99"),
    "max": _itl("max"),
    "TTFT ms": lambda entry: _ms((entry["ttft_ms"] or {}).get("median")),
    "GB/s": lambda entry: speed_text(entry["achieved_bandwidth_gb_s"]),
    "MBU": lambda entry: mbu_bar(entry["mbu"]),
    "roofline": lambda entry: speed_text(entry["roofline_tokens_per_second"]),
    "FLOP/B": lambda entry: speed_text(entry["arithmetic_intensity"]),
    "memory": lambda entry: format_bytes(entry["peak_memory_bytes"]) if entry["peak_memory_bytes"] else "",
    "drift": lambda entry: "" if entry["drift"] is None else f"{entry['drift']:+.1%}",
}
