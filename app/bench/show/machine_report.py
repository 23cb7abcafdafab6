"""The figures of one machine as TOML, in the form of a `[[machine]]` of assets/measured.toml.

The top of assets/measured.toml explains the keys. Predictions read some of them (`app.predict.measured`), so a key
that is renamed here has to be renamed there, too.

Guard: tests/app/bench/test_machine_report.py writes a report, and reads it back as predictions do.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tomlkit
from tomlkit.items import Table

from headrace.app.bench.measure.records import Interval, Result, RunDocument

if TYPE_CHECKING:
    from headrace.app.verify.verify import VerifyDocument

_DIGITS = 4  # significant
_HASH = 12  # characters of a model's digest: enough to tell the models of a report apart

Facts = dict[str, object]
"""Keys and values of a table of the file."""


def machine_report(
    documents: Sequence[RunDocument], verification: "VerifyDocument | None", notes: Sequence[str]
) -> str:
    """Return the TOML text of one `[[machine]]`.

    Figures of tests that other programs slowed down are left out, with a note.

    documents: of `headrace bench`, at least one, each of one model.
    verification: of `headrace verify`; None if it did not run.
    notes: remarks on the whole run; those of the documents follow.
    """
    rows: list[Facts] = []
    all_notes = list(notes)
    busy = []
    for document in documents:
        all_notes += document.notes
        for entry in document.results:
            if entry.engine != "headrace":
                continue
            if entry.busy:
                busy.append(f"left out, the machine was busy: {entry.model} {entry.test} @ d{entry.depth}")
            else:
                rows.append(_row(document, entry))
    machine = _table(_about(documents, list(dict.fromkeys([*all_notes, *busy]))))
    if verification is not None:
        machine.add("verify", _table(_verification(verification)))
    speeds = tomlkit.aot()
    for row in rows:
        speeds.append(_table(row))
    machine.add("speeds", speeds)

    # [[machine]], [machine.verify], [[machine.speeds]]
    machines = tomlkit.aot()
    machines.append(machine)
    file = tomlkit.document()
    file.add("machine", machines)
    return file.as_string()


def _about(documents: Sequence[RunDocument], notes: Sequence[str]) -> Facts:
    """Return the machine's facts; unknown ones are left out. Peaks are the best of all runs."""
    last = documents[-1]
    device = last.device
    peaks = [peak for document in documents if (peak := document.device.measured_peak_gb_s)]
    energies = [entry.energy_per_token for document in documents for entry in document.results]
    idle = [energy.idle_watts for energy in energies if energy is not None and energy.idle_watts is not None]
    memory = device.memory_bytes
    facts = {
        "chip": device.name,
        "gpu_cores": device.gpu_cores,
        "memory_gb": round(memory / 2**30) if memory else None,
        "backend": device.backend,
        "os": device.os,
        "date": last.created[:10],
        "command": last.command,
        "versions": last.versions,
        "memory_gb_s": _rounded(max(peaks, default=None)),
        "idle_watts": _rounded(min(idle, default=None)),
        "notes": list(notes),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _verification(verification: "VerifyDocument") -> Facts:
    """Return whether all checks passed, and how many had each result."""
    results = Counter(check.result.replace(" ", "_") for check in verification.checks)
    return {"model": verification.model, "passed": verification.passed, **results}


def _row(document: RunDocument, entry: Result) -> Facts:
    """Return the row of a test of headrace, with mlx-lm's speed in the same rounds if it was measured."""
    row: dict[str, object] = {
        "model": entry.model,
        "headers": str(document.model.headers_sha256)[:_HASH],
        "test": entry.test,
        "depth": entry.depth,
        "tokens_per_second": _interval(entry.tokens_per_second.median, entry.tokens_per_second),
    }
    for peer in document.results:
        if (peer.engine, peer.test, peer.depth) == ("mlx-lm", entry.test, entry.depth):
            row["mlx_lm"] = _rounded(peer.tokens_per_second.median)
    for ratio in document.ratios:
        if (ratio.base, ratio.test, ratio.depth) == ("mlx-lm", entry.test, entry.depth):
            row["ratio"] = _interval(ratio.ratio, ratio)
    if entry.mbu is not None:
        row["mbu"] = _rounded(entry.mbu)
    if entry.energy_per_token is not None and entry.energy_per_token.joules is not None:
        row["joules_per_token"] = _rounded(entry.energy_per_token.joules)
    return row


def _interval(middle: float, figure: Interval) -> list[float]:
    """Return [middle, low, high], or the middle alone after one round."""
    values = [_rounded(value) for value in (middle, figure.low, figure.high)]
    return [value for value in values if value is not None]


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return float(f"{value:.{_DIGITS}g}")


def _table(values: Facts) -> Table:
    table = tomlkit.table()
    for key, value in values.items():
        table.add(key, value)
    return table
