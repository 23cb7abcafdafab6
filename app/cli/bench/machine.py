"""`headrace bench --report mac`: fixed tests of fixed models, as one file in the form of assets/measured.toml.

The file is written after every model, so Ctrl-C (exit code 130) keeps what is measured. The top of
assets/measured.toml explains its keys; `app.predict.measured` reads those that predictions need.

Guards: tests/app/cli/bench/test_machine.py and test_machine_report.py.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import tomlkit
from msgspec.structs import replace
from tomlkit.items import Table

from headrace.app.bench.measure.plan import plan
from headrace.app.bench.measure.records import Interval, Result, RunDocument
from headrace.app.bench.measure.run import MeasureOptions, run
from headrace.app.bench.show.live import live_view
from headrace.app.chat.download_plan import download_plan
from headrace.app.cli.bench.options import BenchOptions, chosen_peers, typed_options
from headrace.app.cli.load_for_answers import load_noted, resolved_model
from headrace.app.cli.say import say
from headrace.app.config.load_options import ModelSpec
from headrace.app.output.output_file import check_output, write_output
from headrace.app.predict.prediction import predict
from headrace.app.predict.targets import targets_for
from headrace.app.verify.checks import VerifyPlan
from headrace.app.verify.verify import VerifyDocument, verify
from headrace.models.registry.catalog import find
from headrace.runtime.errors import INTERRUPTED, HeadraceError, UsageError
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.metrics.units import format_bytes

# The fixed models and tests, so that files of different machines can be compared.
MODELS = (
    *("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b"),
    *("qwen3-4b", "qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b"),
)
PROMPT = 512
GENERATE = 128
DEPTHS = (0, 512, 4096)
ROUNDS = 3
_DIGITS = 4  # significant
_HASH = 12  # characters of a model's digest: enough to tell the models of a report apart
# Parameters of `BenchOptions` that may be given.
_ACCEPTED = {"models", "repetitions", "report", "force"}


def bench_machine(ctx: click.Context, given: BenchOptions) -> int:
    """Measure, write the file and return the exit code. Raises UsageError for options of other benchmarks."""
    others = [flag for name, flag in typed_options(ctx).items() if name not in _ACCEPTED]
    if others:
        raise UsageError(f"--report {given.report} has fixed tests: leave out {', '.join(others)}")
    host = machine()
    if str(given.report) == "mac" and host.backend != "metal":
        raise UsageError("--report mac needs a Mac's GPU", "`--report machine` measures any machine")
    path = Path(f"measured-{re.sub('[^a-z0-9]+', '-', host.device_name.lower()).strip('-')}.toml")
    check_output(path, "--report")
    names = given.models or _agreed(_fitting())
    report = _MachineReport(path, given)
    for name in names:
        report.measure(name, host)
        if report.interrupted:
            break
    if not report.documents:
        raise HeadraceError("nothing was measured")
    if not report.interrupted:
        report.verify(report.models[0])
    say(f"written to {path}; CONTRIBUTING.md says how it becomes part of headrace", err=True)
    return INTERRUPTED if report.interrupted else 0


Facts = dict[str, object]
"""Keys and values of a table of the file."""


class _MachineReport:
    """The file and its figures so far."""

    def __init__(self, path: Path, given: BenchOptions) -> None:
        self._path = path
        self._given = given
        self._verification: VerifyDocument | None = None
        self._notes: list[str] = []
        self.documents: list[RunDocument] = []
        self.models: list[str] = []
        self.interrupted = False

    def measure(self, name: str, host: Machine) -> None:
        """Measure one model. One that fails is noted."""
        given = self._given
        if host.backend != "cpu":  # MLX has no fast kernels for CPUs: mlx-lm is compared on GPUs alone
            given = replace(given, peers=("mlx-lm",))
        options = MeasureOptions(
            models=[name],
            tests=plan([PROMPT], [GENERATE], DEPTHS, combined=False, batches=[1], arrivals=[0]),
            rounds=given.repetitions or ROUNDS,
            force=given.force,
            peers=chosen_peers(given, "f16"),
        )
        say(f"measuring {name}", err=True)
        try:
            with live_view() as show:
                document = run(options, show)
        except KeyboardInterrupt:
            self.interrupted = True
        except HeadraceError as error:
            self._notes.append(f"{name} was not measured: {error}")
            say(f"headrace: {self._notes[-1]}", err=True)
        else:
            self.documents.append(document)
            self.models.append(name)
            self.interrupted = document.interrupted
        self._write()

    def verify(self, name: str) -> None:
        """Run `headrace verify` on one model."""
        say(f"verifying {name}", err=True)
        try:
            loaded = load_noted(resolved_model(name, quiet=False), ModelSpec(force=self._given.force))
            self._verification = verify(loaded, VerifyPlan())
        except KeyboardInterrupt:
            self.interrupted = True
        else:
            self.interrupted = self._verification.interrupted
        self._write()

    def _write(self) -> None:
        if self.documents:
            write_output(self._path, machine_report(self.documents, self._verification, self._notes))


def _fitting() -> list[str]:
    """Return the models that fit into this machine's memory with their longest test."""
    [here] = targets_for((), None, others=False)
    tokens = max(DEPTHS) + PROMPT + GENERATE
    return [name for name in MODELS if predict(find(name).step_shape, here, tokens).fits is not False]


def _agreed(names: Sequence[str]) -> Sequence[str]:
    """Return the models that are installed, and the others after a yes to their download.

    The first is fetched without asking: it is the smallest, the default model unless that does not fit.
    """
    plans = {name: download_plan(name) for name in names}
    missing = {name: plan for name in names[1:] if (plan := plans[name]) is not None}
    size = format_bytes(sum(plan.bytes or 0 for plan in missing.values()))
    if missing and sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm(f"Download {', '.join(missing)} ({size})?", default=True, err=True):
            return names
    elif missing:
        say(f"without {', '.join(missing)} ({size} to download): `headrace models pull NAME` fetches one", err=True)
    return [name for name in names if name not in missing]


def machine_report(documents: Sequence[RunDocument], verification: VerifyDocument | None, notes: Sequence[str]) -> str:
    """Return the TOML text of one `[[machine]]`. documents: of `headrace bench`, at least one, each of one model.

    Figures of tests that other programs slowed down are left out, with a note.
    """
    file = tomlkit.document()
    machines = tomlkit.aot()
    machine = tomlkit.table()
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
    for key, value in _about(documents, list(dict.fromkeys([*all_notes, *busy]))).items():
        machine.add(key, value)
    if verification is not None:
        machine.add("verify", _table(_verified(verification)))
    speeds = tomlkit.aot()
    for row in rows:
        speeds.append(_table(row))
    machine.add("speeds", speeds)
    machines.append(machine)
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


def _verified(verification: VerifyDocument) -> Facts:
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
        if (ratio.peer, ratio.test, ratio.depth) == ("mlx-lm", entry.test, entry.depth):
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
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _table(values: Facts) -> Table:
    made = tomlkit.table()
    for key, value in values.items():
        made.add(key, value)
    return made
