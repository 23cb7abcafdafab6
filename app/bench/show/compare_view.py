"""A comparison as a terminal table or plain lines. Only significant differences are highlighted.

`headrace bench compare` prints it; `app.bench.compare.documents` makes the comparison and its verdicts.
"""

from collections.abc import Sequence

from rich.text import Text

from headrace.app.bench.compare.documents import ComparedTest, Comparison
from headrace.app.bench.show.phrases import label
from headrace.app.output.tables import Column, print_apart, table_lines
from headrace.app.output.terminal import console
from headrace.runtime.metrics.units import speed_text

_STYLES = {"slower": "bold red", "faster": "bold green", "too few repetitions": "yellow", "no result": "yellow"}


def show(comparison: Comparison) -> None:
    """Print it on standard output."""
    screen = console()
    print_apart(*_columns(comparison))
    for line in _notes(comparison):
        screen.print(Text(line, style="yellow"))
    screen.print(Text(_conclusion(comparison), style="bold"))


def lines(comparison: Comparison) -> list[str]:
    """Return it as plain lines."""
    table = table_lines(_columns(comparison), None, rule=False)
    return [*(line.plain for line in table), *_notes(comparison), _conclusion(comparison)]


def _columns(comparison: Comparison) -> list[Column]:
    rows = comparison.tests
    styles = [_STYLES.get(row.verdict, "dim") for row in rows]

    def styled(texts: Sequence[str]) -> list[Text]:
        return [Text(text, style=style) for text, style in zip(texts, styles, strict=True)]

    return [
        Column("test", [_name(row) for row in rows], right=False),
        Column("A tok/s", [speed_text(row.a_tokens_per_second) for row in rows], leaves=2),
        Column("B tok/s", [speed_text(row.b_tokens_per_second) for row in rows], leaves=1),
        Column("B / A", styled(["" if row.ratio is None else f"{row.ratio:.3f}" for row in rows])),
        Column("95 % interval", [_interval(row) for row in rows], leaves=3),
        Column("", styled([row.verdict for row in rows]), right=False),
    ]


def _name(row: ComparedTest) -> str:
    if row.engine == "headrace":
        return label(row)
    return f"{row.engine} {label(row)}"


def _interval(row: ComparedTest) -> str:
    if row.ratio is None:
        return ""
    return f"{row.low:.3f} to {row.high:.3f}"


def _notes(comparison: Comparison) -> list[str]:
    only = [("A", comparison.only_in_a), ("B", comparison.only_in_b)]
    return [*comparison.differences, *(f"only in {side}: {', '.join(names)}" for side, names in only if names)]


def _conclusion(comparison: Comparison) -> str:
    verdicts = [row.verdict for row in comparison.tests]
    if not verdicts:
        return "No common test."
    slower = verdicts.count("slower")
    faster = verdicts.count("faster")
    if set(verdicts) <= {"no result", "too few repetitions"}:
        return "No result: measure more rounds (-r), on an idle machine."
    if not slower and not faster:
        return "No significant difference."
    return f"B is significantly slower in {slower} and faster in {faster} of {len(verdicts)} tests."
