"""Terminal views of benchmarks: a finished run, and a comparison of two runs.

`headrace bench` and `bench compare` print them. In a pipe a run is Markdown (`formats.py`).

Guards: tests/app/bench/test_views.py; tests/app/bench/test_compare.py for the lines of a comparison.
"""

from collections.abc import Mapping, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.app.bench.compare import ComparedTest, RunComparison, Verdict
from headrace.app.bench.measure.records import Result, RunDocument
from headrace.app.bench.measure.result import DRIFT
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.columns import results_table
from headrace.app.bench.show.formats import explanation_line, labelled_lines, model_line, peak_line
from headrace.app.bench.show.phrases import energy_line, label, profile_rows
from headrace.app.output.tables import Column, print_apart, table_lines
from headrace.app.output.terminal import console
from headrace.runtime.metrics.units import percent, speed_text

_STYLES: Mapping[Verdict, str] = {
    "slower": "bold red",
    "faster": "bold green",
    "too few repetitions": "yellow",
    "no result": "yellow",
}


def show_run(document: RunDocument) -> None:
    """Print a run's results and circumstances on standard output."""
    screen = console()
    device = document.device

    screen.print()
    backend = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}.get(device.backend, device.backend)
    screen.print(Text.assemble((device.name, "bold"), (f"  {backend}, {device.kernels_name} kernels", "dim")))
    for model in document.all_models:
        screen.print(Text(model_line(model), style="dim"))
    screen.print(results_table(document.results, screen.width))

    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="dim", min_width=9)
    facts.add_column()
    last = ""  # label, which rows of the same one do not repeat
    for name, text in _run_facts(document, screen.width):
        facts.add_row("" if name == last else name, text)
        last = name
    screen.print(Padding(facts, (0, 0, 1, 1)))


def _run_facts(document: RunDocument, width: int) -> list[tuple[str, Text]]:
    """Return (label, text) rows."""
    rows = [("memory", Text(peak_line(document.device)))]
    if line := energy_line(document):
        rows.append(("energy", Text(line)))
    if line := explanation_line(document):
        rows.append(("in words", Text(line)))
    rows += [("engine", Text(setup_line(setup))) for setup in document.engines]
    for name, line, style in labelled_lines(document):
        # `formats.step_cost_line` begins with these words; here its label, "step", stands in their place.
        rows.append((name, Text(line.removeprefix("step cost: "), style=style)))
    if document.profile is not None:
        rows += profile_rows(document.profile, width)
    notes = [*document.notes, *_test_notes(document.results)]
    if document.interrupted:
        notes.append(f"interrupted in round {document.rounds}: results are incomplete")
    return [*rows, *(("note", Text(note, style="yellow")) for note in notes)]


def _test_notes(results: Sequence[Result]) -> list[str]:
    """Return the tests' notes, each once."""
    tests: dict[str, list[str]] = {}
    for entry in results:
        for note in entry.notes:
            tests.setdefault(note, []).append(label(entry))
    lines = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in tests.items()]
    drifts = [(entry.drift, entry) for entry in results if entry.drift is not None and abs(entry.drift) > DRIFT]
    if drifts:
        drift, worst = max(drifts, key=lambda pair: abs(pair[0]))
        lines.append(
            f"speed drifted over the run in {len(drifts)} of {len(results)} tests, "
            f"most in {label(worst)} ({worst.engine}): {percent(drift, is_signed=True)} "
            "from the first third to the last"
        )
    return lines


# -- comparison of two runs -------------------------------------------------------------------------------------------


def show_comparison(comparison: RunComparison) -> None:
    """Print a comparison of two runs on standard output."""
    screen = console()
    print_apart(*_comparison_columns(comparison))
    for line in _differences(comparison):
        screen.print(Text(line, style="yellow"))
    screen.print(Text(_conclusion(comparison), style="bold"))


def comparison_lines(comparison: RunComparison) -> list[str]:
    """Return it as plain lines."""
    table = table_lines(_comparison_columns(comparison), None, rule=False)
    return [*(line.plain for line in table), *_differences(comparison), _conclusion(comparison)]


def _comparison_columns(comparison: RunComparison) -> list[Column]:
    rows = comparison.tests
    styles = [_STYLES.get(row.verdict, "dim") for row in rows]

    def styled(texts: Sequence[str]) -> list[Text]:
        return [Text(text, style=style) for text, style in zip(texts, styles, strict=True)]

    return [
        Column("test", [_test_name(row) for row in rows], right=False),
        Column("A tok/s", [speed_text(row.a_tokens_per_second) for row in rows], leaves=2),
        Column("B tok/s", [speed_text(row.b_tokens_per_second) for row in rows], leaves=1),
        Column("B / A", styled(["" if row.ratio is None else f"{row.ratio:.3f}" for row in rows])),
        Column("95 % interval", [_interval(row) for row in rows], leaves=3),
        Column("", styled([row.verdict for row in rows]), right=False),
    ]


def _test_name(row: ComparedTest) -> str:
    if row.engine == "headrace":
        return label(row)
    return f"{row.engine} {label(row)}"


def _interval(row: ComparedTest) -> str:
    if row.ratio is None:
        return ""
    return f"{row.low:.3f} to {row.high:.3f}"


def _differences(comparison: RunComparison) -> list[str]:
    only = [("A", comparison.only_in_a), ("B", comparison.only_in_b)]
    return [*comparison.differences, *(f"only in {side}: {', '.join(names)}" for side, names in only if names)]


def _conclusion(comparison: RunComparison) -> str:
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
