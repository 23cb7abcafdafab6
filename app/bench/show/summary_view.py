"""A finished run on a terminal: machine, model, table and notes."""

from typing import TYPE_CHECKING, Any

from headrace.app.bench.measure.result import DRIFT
from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.show.formats import (
    arrival_line,
    arrivals,
    kv_ratio_line,
    label,
    model_line,
    peak_line,
    ratio_line,
    scaling_line,
    speculation_lines,
    step_cost_line,
)
from headrace.app.bench.show.table import results_table
from headrace.app.output.terminal import console

if TYPE_CHECKING:
    from rich.text import Text


def show(document: dict[str, Any]) -> None:
    """Print it on standard output."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    screen = console()
    device = document["device"]
    screen.print()
    backend = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}.get(device["backend"], device["backend"])
    kernels = device["kernels"].get("kernels", "?")
    screen.print(Text.assemble((device["name"], "bold"), (f"  {backend}, {kernels} kernels", "dim")))
    for model in document.get("models") or [document["model"]]:
        screen.print(Text(model_line(model), style="dim"))
    screen.print(results_table(document["results"], screen.width))
    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="dim", min_width=9)
    facts.add_column()
    for name, text in _facts(document, screen.width):
        facts.add_row(name, text)
    screen.print(Padding(facts, (0, 0, 1, 1)))


def _facts(document: dict[str, Any], width: int) -> list[tuple[str, "Text"]]:
    from rich.text import Text

    rows = [("memory", Text(peak_line(document["device"])))]
    for number, setup in enumerate(document.get("engines") or []):
        rows.append(("" if number else "engine", Text(setup_line(setup))))
    if document["step_cost"]:
        rows.append(("step", Text(step_cost_line(document["step_cost"]).removeprefix("step cost: "))))
    for number, ratio in enumerate(document["ratios"]):
        style = "green" if ratio["low"] > 1 else "red" if ratio["high"] < 1 else ""
        rows.append(("" if number else "ratio", Text(ratio_line(ratio), style=style)))
    for number, ratio in enumerate(document.get("kv_ratios", [])):
        style = "green" if ratio["low"] > 1 else "red" if ratio["high"] < 1 else ""
        rows.append(("" if number else "K/V", Text(kv_ratio_line(ratio), style=style)))
    for number, scaled in enumerate(document.get("scaling", [])):
        rows.append(("" if number else "batch", Text(scaling_line(scaled))))
    for number, entry in enumerate(arrivals(document)):
        rows.append(("" if number else "arrival", Text(arrival_line(entry))))
    for number, line in enumerate(speculation_lines(document)):
        rows.append(("" if number else "guesses", Text(line, style="bold red" if _broken(document, line) else "")))
    if document.get("profile"):
        from headrace.app.bench.show.profile_view import profile_rows

        rows += profile_rows(document["profile"], width)
    notes = [*document["notes"], *_test_notes(document["results"])]
    if document["interrupted"]:
        notes.append(f"interrupted in round {document['rounds']}: fewer repetitions than asked for")
    rows += [("" if number else "note", Text(note, style="yellow")) for number, note in enumerate(notes)]
    return rows


def _broken(document: dict[str, Any], line: str) -> bool:
    """Return whether the line reports tokens wrongly changed by speculation."""
    return bool((document.get("identity") or {}).get("broken")) and "must not be" in line


def _test_notes(results: list[dict[str, Any]]) -> list[str]:
    """Return the tests' notes, each once."""
    tests: dict[str, list[str]] = {}
    for entry in results:
        for note in entry["notes"]:
            tests.setdefault(note, []).append(label(entry))
    lines = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in tests.items()]
    drifts = [entry for entry in results if entry["drift"] is not None and abs(entry["drift"]) > DRIFT]
    if drifts:
        worst = max(drifts, key=lambda entry: abs(entry["drift"]))
        lines.append(
            f"speed drifted over the run in {len(drifts)} of {len(results)} tests, "
            f"most in {label(worst)} ({worst['engine']}): {worst['drift']:+.0%} from the first third to the last"
        )
    return lines
