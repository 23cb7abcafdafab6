"""Saved runs as a table, and each test's speed over time as block bars from zero."""

import sys
from collections.abc import Sequence

from rich.text import Text

from headrace.app.bench.compare.history import History, SavedRun
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.show.phrases import label
from headrace.app.output.tables import Column, print_lines, print_table, table_lines
from headrace.app.output.terminal import console, table_width
from headrace.runtime.metrics.units import percent, speed_text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LAST = 24  # runs in a row of blocks


def show_history(history: History) -> None:
    """Print runs, newest last, then the tests measured more than once."""
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
    series = {key: speeds for key, speeds in _series(runs).items() if len(speeds) > 1}
    if series:
        screen.print()
        screen.print(Text("Speed over the saved runs, from zero; the change is from first to last.", style="dim"))
        print_table(_series_columns(series), header=False)


def _columns(runs: Sequence[SavedRun]) -> list[Column]:
    when, models, devices = zip(*(_circumstances(run.document) for run in runs), strict=True)
    return [
        Column("run", [str(run.number) for run in runs]),
        Column("when (UTC)", when, right=False),
        Column("model", models, right=False, least=12),
        Column("device", devices, right=False, leaves=1, least=12),
    ]


def _series_columns(series: dict[tuple[str, str], list[float]]) -> list[Column]:
    return [
        Column("", [Text(test, style="dim") for test, _ in series], right=False),
        Column("", [Text(device, style="dim") for _, device in series], right=False, leaves=2),
        Column("", [Text(blocks(speeds), style="cyan") for speeds in series.values()], right=False, leaves=1),
        Column("", [speed_text(speeds[-1]) for speeds in series.values()]),
        Column("", [percent(speeds[-1] / speeds[0] - 1, 1, is_signed=True) for speeds in series.values()]),
    ]


def blocks(speeds: list[float]) -> str:
    """Draw the last speeds as bars from zero to the largest."""
    shown = speeds[-_LAST:]
    top = max(shown)
    return "".join(_BLOCKS[max(1, round(speed / top * (len(_BLOCKS) - 1)))] for speed in shown)


def _circumstances(document: RunDocument) -> tuple[str, str, str]:
    """Return when, model and device."""
    return document.created[:16].replace("T", " "), document.model.name, document.device.name


def _tests(document: RunDocument) -> list[str]:
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


def _series(runs: Sequence[SavedRun]) -> dict[tuple[str, str], list[float]]:
    """Return mean speeds by test and device, oldest first."""
    series: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for entry in run.document.results:
            test = f"{entry.engine} {entry.model} {label(entry)}"
            series.setdefault((test, run.document.device.name), []).append(entry.tokens_per_second.mean)
    return series
