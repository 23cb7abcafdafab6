"""Columns of a run's tests, and the tables of them, for the terminal and in Markdown.

Each table names engine, model and test of a row in its own way; the figures after them are columns of
`RESULT_COLUMNS`, or of `WORKLOAD_COLUMNS` for workloads with speculation. The HTML report reads them, too. Rows are
entries of the JSON document, so running and finished runs look alike.

A new figure is a row of one of the two tables, with a heading for each view that shows it.

Guard: tests/app/bench/test_views.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec import Struct
from rich.console import Group
from rich.text import Text

from headrace.app.bench.measure.records import Result, SpeculationGain
from headrace.app.bench.show.phrases import above_one, below_one, bracketed, energy_cell, interval, label, spread
from headrace.app.output.document import markdown_table
from headrace.app.output.tables import Column, table_lines
from headrace.runtime.metrics.units import decimals, format_bytes, percent, speed_text

ColumnCell = str | Text | float | None
_BAR = 6  # cells of the bar of MBU
# Shares of the bandwidth below which the bar is red and yellow: something else than memory takes most of the time.
_POOR = 0.25
_FAIR = 0.5


class ResultColumn(Struct, frozen=True):
    """A column of figures. A view without a heading for it leaves it out.

    key: path of the figure in an entry of `results`.
    cell: what views show; None: the figure at `key`. A view formats numbers itself.
    terminal: heading in the terminal's table.
    leaves: order in which columns leave a narrow terminal, see `output.tables.Column`.
    right: aligned right in the terminal's table.
    markdown: heading in Markdown.
    digits: decimals of a number in Markdown.
    is_shown: whether Markdown has the column for these results; None: always.
    html: heading in the report.
    """

    key: str = ""
    cell: Callable[[Result], ColumnCell] | None = None
    terminal: str | None = None
    leaves: int = 0
    right: bool = True
    markdown: str | None = None
    digits: int = 2
    is_shown: Callable[[Sequence[Result]], bool] | None = None
    html: str | None = None

    def terminal_cell(self, entry: Result) -> str | Text:
        value = self._value(entry)
        if isinstance(value, str | Text):
            return value
        return speed_text(value)

    def is_in_markdown(self, results: Sequence[Result]) -> bool:
        return self.markdown is not None and (self.is_shown is None or self.is_shown(results))

    def markdown_cell(self, entry: Result) -> str:
        value = self._value(entry)
        if isinstance(value, str | Text):
            return str(value)
        return decimals(value, self.digits)

    def html_cell(self, entry: Result) -> str:
        return str(self.terminal_cell(entry))

    def _value(self, entry: Result) -> ColumnCell:
        """Return the cell, or the figure at `key`; None where it, or what it is a part of, is absent."""
        if self.cell is not None:
            return self.cell(entry)
        value: Any = entry
        for part in self.key.split("."):
            if value is None:
                break
            value = getattr(value, part)
        return cast(ColumnCell, value)


def mbu_cell(entry: Result) -> str:
    """Format MBU: `83 %`, or `busy` if other programs slowed the test down."""
    return "busy" if entry.busy else percent(entry.mbu)


def _mbu_bar(entry: Result) -> Text:
    """Draw the share of memory bandwidth used. Red: very little, or more than the peak."""
    value = entry.mbu
    if value is None:
        return Text("")
    filled = max(0, min(_BAR, round(value * _BAR)))
    if value > 1 or value < _POOR:
        style = "red"
    elif value < _FAIR:
        style = "yellow"
    else:
        style = "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR - filled), "dim"))


def _mean(entry: Result) -> Text:
    return Text(speed_text(entry.tokens_per_second.mean), style="bold")


def _mean_and_sd(entry: Result) -> str:
    speed = entry.tokens_per_second
    if spread(speed) is None:
        return f"{speed.mean:.2f}"
    return f"{speed.mean:.2f} ± {speed.sd:.2f}"


def _median_and_interval(entry: Result) -> str:
    speed = entry.tokens_per_second
    return f"{speed.median:.2f}{bracketed(speed)}"


def _sd(entry: Result) -> float | None:
    return spread(entry.tokens_per_second)


def _is_batch(entry: Result) -> bool:
    """Return whether several sequences decode together."""
    return entry.batch > 1


def _each(entry: Result) -> float | None:
    """Return the speed per sequence, if several decode together."""
    return entry.tokens_per_second_each if _is_batch(entry) else None


def _any_batch(results: Sequence[Result]) -> bool:
    return any(map(_is_batch, results))


def _any_energy(results: Sequence[Result]) -> bool:
    return any(entry.energy_per_token for entry in results)


def _percentiles(entry: Result) -> str:
    itl = entry.itl_ms
    return " / ".join(map(decimals, (itl.p50, itl.p95, itl.p99, itl.max)))


def _memory(entry: Result) -> str:
    if entry.peak_memory_bytes:
        return format_bytes(entry.peak_memory_bytes)
    return ""


def _drift(entry: Result) -> str:
    if entry.drift is None:
        return ""
    return percent(entry.drift, is_signed=True)


RESULT_COLUMNS: Sequence[ResultColumn] = (
    ResultColumn(cell=_mean, terminal="tok/s"),
    ResultColumn(cell=_mean_and_sd, markdown="tok/s"),
    ResultColumn("tokens_per_second.median", html="tok/s"),
    ResultColumn(cell=_median_and_interval, markdown="median (95 %)"),
    ResultColumn(cell=_each, terminal="each", leaves=2),
    ResultColumn("tokens_per_second_each", markdown="tok/s each", is_shown=_any_batch, html="each"),
    ResultColumn(cell=_sd, terminal="± sd", leaves=5, html="sd"),
    ResultColumn(cell=lambda entry: interval(entry.tokens_per_second, speed_text, "–"), terminal="95 %", leaves=6),
    ResultColumn(cell=lambda entry: interval(entry.tokens_per_second, speed_text), html="95 % interval"),
    ResultColumn("itl_ms.p50", terminal="p50 ms", leaves=2, html="p50 ms"),
    ResultColumn("itl_ms.p95", terminal="p95", leaves=8, html="p95"),
    ResultColumn("itl_ms.p99", terminal="p99", leaves=3, html="p99"),
    ResultColumn("itl_ms.max", terminal="max", leaves=10, html="max"),
    ResultColumn(cell=_percentiles, markdown="ITL p50 / p95 / p99 / max ms"),
    ResultColumn("ttft_ms.median", terminal="TTFT ms", leaves=4, markdown="TTFT ms", digits=1, html="TTFT ms"),
    ResultColumn("achieved_bandwidth_gb_s", terminal="GB/s", leaves=4, markdown="GB/s", digits=1, html="GB/s"),
    ResultColumn(cell=mbu_cell, terminal="MBU", leaves=1, markdown="MBU", html="MBU"),
    ResultColumn(cell=_mbu_bar, terminal="", leaves=7),
    ResultColumn(cell=energy_cell, terminal="energy", leaves=8),  # next to MBU; Markdown has it further back
    ResultColumn(
        "roofline_tokens_per_second",
        terminal="roofline",
        leaves=9,
        markdown="roofline tok/s",
        digits=0,
        html="roofline",
    ),
    ResultColumn("arithmetic_intensity", terminal="FLOP/B", leaves=11, markdown="FLOP/byte", html="FLOP/byte"),
    ResultColumn(cell=energy_cell, markdown="J/token", is_shown=_any_energy),
    ResultColumn(cell=_memory, terminal="memory", leaves=12, markdown="peak memory", html="memory"),
    ResultColumn(cell=_drift, terminal="drift", leaves=13),
)


def _speculation(entry: Result) -> SpeculationGain:
    assert entry.speculation is not None, "a workload with speculation"
    return entry.speculation


def _gain(entry: Result) -> Text:
    """Format the gain: green if significantly faster, red if slower."""
    ratio = _speculation(entry).ratio
    if above_one(ratio):
        style = "bold green"
    elif below_one(ratio):
        style = "bold red"
    else:
        style = "bold"
    return Text(f"{ratio.median:.2f}x", style=style)


def _gain_and_interval(entry: Result) -> str:
    ratio = _speculation(entry).ratio
    return f"{ratio.median:.2f}x{bracketed(ratio)}"


def _is_same(entry: Result) -> bool:
    return _speculation(entry).same_tokens


WORKLOAD_COLUMNS: Sequence[ResultColumn] = (
    ResultColumn(cell=label, terminal="workload", right=False, markdown="workload"),
    ResultColumn("speculation.kind", terminal="kind", leaves=7, right=False, markdown="kind"),
    ResultColumn("tokens_per_second.median", terminal="tok/s", markdown="tok/s"),
    ResultColumn("speculation.plain_tokens_per_second.median", terminal="without", leaves=2, markdown="without"),
    ResultColumn(cell=_gain, terminal="gain"),
    ResultColumn(cell=lambda entry: interval(_speculation(entry).ratio, decimals, "–"), terminal="95 %", leaves=1),
    ResultColumn(cell=_gain_and_interval, markdown="gain (95 %)"),
    ResultColumn(
        cell=lambda entry: percent(_speculation(entry).acceptance) or "–",
        terminal="accepted",
        leaves=3,
        markdown="accepted",
    ),
    ResultColumn(cell=lambda entry: decimals(_speculation(entry).accepted_per_step), markdown="accepted per step"),
    ResultColumn(
        cell=lambda entry: decimals(_speculation(entry).tokens_per_step),
        terminal="tok/step",
        leaves=4,
        markdown="tokens per step",
    ),
    ResultColumn(cell=lambda entry: decimals(_speculation(entry).proposed_per_step), terminal="drafts/step", leaves=8),
    ResultColumn("itl_ms.p50", terminal="p50 ms", leaves=9),
    ResultColumn("achieved_bandwidth_gb_s", terminal="GB/s", leaves=10),
    ResultColumn(cell=lambda entry: "✓" if _is_same(entry) else "✗", terminal="same", leaves=5),
    ResultColumn(cell=lambda entry: "yes" if _is_same(entry) else "no", markdown="same tokens"),
)


def results_table(results: Sequence[Result], width: int) -> Group:
    """Return all tests for a terminal, a table per engine and model; columns by importance up to `width`."""
    groups = list(dict.fromkeys((entry.engine, entry.model) for entry in results))
    test = ResultColumn(cell=label, terminal="test", right=False)
    parts: list[Text] = []
    for engine, model in groups:
        if len(groups) > 1:
            parts.append(Text.assemble("\n", (engine, "bold cyan"), (f"  {model}", "dim")))
        tests, workloads = _by_kind([entry for entry in results if (entry.engine, entry.model) == (engine, model)])
        if tests:
            parts += _terminal_lines(tests, [test, *RESULT_COLUMNS], width)
        if workloads:
            parts += [Text(), *_terminal_lines(workloads, WORKLOAD_COLUMNS, width)]
    return Group(*parts)


def _terminal_lines(results: Sequence[Result], columns: Sequence[ResultColumn], width: int) -> list[Text]:
    shown = [
        Column.of(results, column.terminal, column.terminal_cell, column.leaves, right=column.right)
        for column in columns
        if column.terminal is not None
    ]
    return table_lines(shown, width)


def markdown_tables(results: Sequence[Result]) -> list[str]:
    """Return the lines of the tables, each followed by an empty line."""
    tests, workloads = _by_kind(results)
    test = ResultColumn(cell=label, markdown="test")
    lines: list[str] = []
    if tests:
        lines += [*_markdown_lines(results, tests, [test, *RESULT_COLUMNS]), ""]
    if workloads:
        lines += [*_markdown_lines(results, workloads, WORKLOAD_COLUMNS), ""]
    return lines


def _markdown_lines(results: Sequence[Result], rows: Sequence[Result], figures: Sequence[ResultColumn]) -> list[str]:
    """Return the table of some of the results; engines are named if there are several."""
    columns = [ResultColumn("model", markdown="model"), *figures]
    if len({(entry.engine, entry.model) for entry in results}) > 1:
        columns.insert(0, ResultColumn("engine", markdown="engine"))
    columns = [column for column in columns if column.is_in_markdown(results)]
    head = [str(column.markdown) for column in columns]
    return markdown_table(head, [[column.markdown_cell(entry) for column in columns] for entry in rows])


def _by_kind(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Divide results into tests of lengths and workloads with speculation."""
    tests = [entry for entry in results if entry.speculation is None]
    workloads = [entry for entry in results if entry.speculation is not None]
    return tests, workloads
