"""Result tables for terminals of 40 columns and more.

Made from entries of the JSON document, so running, finished and saved runs look alike.
"""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from headrace.app.bench.show.columns import RESULT_COLUMNS, WORKLOAD_COLUMNS, Entry, ResultColumn
from headrace.app.bench.show.phrases import label
from headrace.app.output.tables import Column, table_lines

_TEST = ResultColumn(cell=label, terminal="test", right=False)


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
        parts += table_lines(_columns(others, [_TEST, *RESULT_COLUMNS]), width) if others else []
        parts += [Text(), *table_lines(_columns(workloads, WORKLOAD_COLUMNS), width)] if workloads else []
    return Group(*parts)


def _columns(results: Sequence[Entry], columns: Sequence[ResultColumn]) -> list[Column]:
    return [
        Column.of(results, column.terminal, column.terminal_cell, column.leaves, right=column.right)
        for column in columns
        if column.terminal is not None
    ]
