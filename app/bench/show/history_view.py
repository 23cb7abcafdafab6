"""The saved runs as a table, and every test's speed over time as a row of blocks with a zero baseline."""

import sys
from typing import Any

from headrace.app.bench.compare.history import History
from headrace.app.bench.show.live import console
from headrace.app.bench.show.table import speed_text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LAST = 24  # runs in a row of blocks


def show_history(kept: History) -> None:
    """Print runs, newest last, then the tests that were measured more than once."""
    runs = list(kept.documents())
    if not runs:
        print("No runs are saved yet. `headrace bench --save` keeps one.")
        return
    if not sys.stdout.isatty():
        print("\n".join("\t".join([str(number), *_cells(document)]) for number, document in runs))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("run", "when (UTC)", "model", "device"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column("tok/s", overflow="fold")
    for number, document in runs:
        table.add_row(str(number), *_cells(document))
    screen.print(table)
    grid = Table.grid(padding=(0, 2))
    for key, speeds in _series(runs).items():
        if len(speeds) > 1:
            change = speeds[-1] / speeds[0] - 1
            grid.add_row(
                Text(key, style="dim"),
                Text(blocks(speeds), style="cyan"),
                f"{speed_text(speeds[-1])}",
                f"{change:+.1%}",
            )
    if grid.row_count:
        screen.print(
            Text("Speed over the saved runs, against zero; the change is from the first to the last.", style="dim")
        )
        screen.print(grid)


def blocks(speeds: list[float]) -> str:
    """The last speeds as bars from zero to the largest."""
    shown = speeds[-_LAST:]
    top = max(shown)
    return "".join(_BLOCKS[max(1, round(speed / top * (len(_BLOCKS) - 1)))] for speed in shown)


def _cells(document: dict[str, Any]) -> list[str]:
    tests = [
        f"{entry['test']}{' @ d' + str(entry['depth']) if entry['depth'] else ''} "
        f"{speed_text(entry['tokens_per_second']['mean'])}"
        for entry in document["results"]
        if entry["engine"] == "headrace"
    ]
    when = document["created"][:16].replace("T", " ")
    return [when, document["model"]["name"], document["device"]["name"], ", ".join(tests)]


def _series(runs: list[tuple[int, dict[str, Any]]]) -> dict[str, list[float]]:
    """Mean speeds by device, model and test, oldest first."""
    series: dict[str, list[float]] = {}
    for _, document in runs:
        for entry in document["results"]:
            depth = f" @ d{entry['depth']}" if entry["depth"] else ""
            key = f"{entry['engine']} {entry['model']} {entry['test']}{depth}, {document['device']['name']}"
            series.setdefault(key, []).append(entry["tokens_per_second"]["mean"])
    return series
