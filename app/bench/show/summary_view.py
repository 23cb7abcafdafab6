"""A finished run on a terminal: machine, model, table and notes.

`bench` prints it after a run, and `bench history --show` for a saved one. In a pipe it is Markdown (`formats.py`).
"""

from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.app.bench.measure.records import Result, RunDocument
from headrace.app.bench.measure.result import DRIFT
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.columns import results_table
from headrace.app.bench.show.formats import explanation_line, labelled_lines, model_line, peak_line
from headrace.app.bench.show.phrases import energy_line, label, profile_rows
from headrace.app.output.terminal import console
from headrace.runtime.metrics.units import percent


def show(document: RunDocument) -> None:
    """Print it on standard output."""
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
    last = ""
    for name, text in _facts(document, screen.width):
        facts.add_row("" if name == last else name, text)
        last = name
    screen.print(Padding(facts, (0, 0, 1, 1)))


def _facts(document: RunDocument, width: int) -> list[tuple[str, Text]]:
    """Return (label, text) rows."""
    rows = [("memory", Text(peak_line(document.device)))]
    if line := energy_line(document):
        rows.append(("energy", Text(line)))
    if line := explanation_line(document):
        rows.append(("in words", Text(line)))
    rows += [("engine", Text(setup_line(setup))) for setup in document.engines]
    for name, line, style in labelled_lines(document):
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
