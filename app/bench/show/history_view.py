"""Table of saved benchmark runs (`headrace bench history`), each with the speeds of its tests below it."""

import sys
from collections.abc import Sequence

from rich.text import Text

from headrace.app.bench.compare.history import History, SavedRun
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.show.phrases import label
from headrace.app.output.tables import Column, print_lines, table_lines
from headrace.app.output.terminal import console, table_width
from headrace.runtime.metrics.units import speed_text


def show_history(history: History) -> None:
    """Print all runs, newest last; in a pipe a line per run, its parts separated by tabs."""
    runs = list(history.runs())
    if not runs:
        print("No saved runs; `headrace bench --save` saves one.")
        return
    if not sys.stdout.isatty():
        for run in runs:
            print(run.number, *_circumstances(run.document), ", ".join(_tests(run.document)), sep="\t")
        return
    screen = console()
    width = table_width(sys.stdout)
    columns = _columns(runs)
    rows = table_lines(columns, width, header=False)
    each = len(rows) // len(runs)  # lines per run: more than one on narrow terminals
    print_lines([Text(), *table_lines(columns, width)[: -len(rows)]])
    for index, run in enumerate(runs):
        print_lines(rows[index * each : (index + 1) * each])
        print_lines([Text(f"  {line}", style="dim") for line in _wrapped(_tests(run.document), screen.width - 2)])


def _columns(runs: Sequence[SavedRun]) -> list[Column]:
    when, models, devices = zip(*(_circumstances(run.document) for run in runs), strict=True)
    return [
        Column("run", [str(run.number) for run in runs]),
        Column("when (UTC)", when, right=False),
        Column("model", models, right=False, least=12),
        Column("device", devices, right=False, leaves=1, least=12),
    ]


def _circumstances(document: RunDocument) -> tuple[str, str, str]:
    """Return when, model and device."""
    return document.created[:16].replace("T", " "), document.model.name, document.device.name


def _tests(document: RunDocument) -> list[str]:
    """Return each test of headrace's own with its mean speed: `tg64 @ d2048 98.1`. Other engines' are left out."""
    return [
        f"{label(entry)} {speed_text(entry.tokens_per_second.mean)}"
        for entry in document.results
        if entry.engine == "headrace"
    ]


def _wrapped(tests: list[str], width: int) -> list[str]:
    """Wrap tests into lines; a test and its figure stay together."""
    lines = tests[:1]
    for test in tests[1:]:
        if len(f"{lines[-1]} · {test}") <= width:
            lines[-1] += f" · {test}"
        else:
            lines.append(test)
    return lines
