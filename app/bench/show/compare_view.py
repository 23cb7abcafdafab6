"""A comparison on a terminal, and as plain lines elsewhere. Only what is significant stands out."""

from typing import Any

from headrace.app.bench.show.live import console
from headrace.app.bench.show.table import speed_text

_STYLES = {"slower": "bold red", "faster": "bold green", "too few repetitions": "yellow"}


def show(comparison: dict[str, Any]) -> None:
    """Print it on standard output."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("test", no_wrap=True)
    for name in ("A tok/s", "B tok/s", "B / A", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in comparison["tests"]:
        style = _STYLES.get(row["verdict"], "dim")
        cells = _cells(row)
        table.add_row(*cells[:3], Text(cells[3], style=style), cells[4], Text(row["verdict"], style=style))
    screen.print(table)
    for line in _notes(comparison):
        screen.print(Text(f" {line}", style="yellow"))
    screen.print(Text(f" {_conclusion(comparison)}", style="bold"))


def lines(comparison: dict[str, Any]) -> list[str]:
    """The same without a terminal."""
    rows = [[*_cells(row), row["verdict"]] for row in comparison["tests"]]
    table = [["test", "A tok/s", "B tok/s", "B / A", "95 % interval", ""], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    shown = [
        "  ".join(
            cell.ljust(w) if i in (0, 5) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [*(line.rstrip() for line in shown), *_notes(comparison), _conclusion(comparison)]


def _cells(row: dict[str, Any]) -> list[str]:
    name = row["test"] + (f" @ d{row['depth']}" if row["depth"] else "")
    name = name if row["engine"] == "headrace" else f"{row['engine']} {name}"
    a, b = speed_text(row["a_tokens_per_second"]), speed_text(row["b_tokens_per_second"])
    if row["ratio"] is None:
        return [name, a, b, "", ""]
    return [name, a, b, f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"]


def _notes(comparison: dict[str, Any]) -> list[str]:
    only = [(side, comparison[f"only_in_{side.lower()}"]) for side in ("A", "B")]
    return [*comparison["differences"], *(f"only in {side}: {', '.join(names)}" for side, names in only if names)]


def _conclusion(comparison: dict[str, Any]) -> str:
    verdicts = [row["verdict"] for row in comparison["tests"]]
    if not verdicts:
        return "No test is in both."
    slower, faster = verdicts.count("slower"), verdicts.count("faster")
    if not slower and not faster:
        return "No significant difference."
    return f"B is significantly slower in {slower} and faster in {faster} of {len(verdicts)} tests."
