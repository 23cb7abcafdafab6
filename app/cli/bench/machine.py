"""`headrace bench --report mac` or `machine`: fixed tests of fixed models, written to one TOML file.

The file is written anew after every model, so Ctrl-C (exit code 130) keeps what is measured. Its content is
`app.bench.show.machine_report`. MODELS, PROMPT, GENERATE and DEPTHS are the same for all machines; a change makes new
files incomparable with older ones.

Guard: tests/app/cli/bench/test_machine.py.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec.structs import replace

from headrace.app.bench.measure.open_engines import MeasureOptions
from headrace.app.bench.measure.plan import plan
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.measure.run import run
from headrace.app.bench.show.live import live_view
from headrace.app.bench.show.machine_report import machine_report
from headrace.app.chat.download_plan import download_plan
from headrace.app.cli.bench.options import BenchArguments, chosen_peers, typed_options
from headrace.app.cli.load_for_answers import load_with_notes, resolved_model
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
PROMPT = 512  # tokens
GENERATE = 128  # tokens
DEPTHS = (0, 512, 4096)  # tokens in the cache
ROUNDS = 3  # without -r
# Parameters of `BenchArguments` that may be given.
_ACCEPTED = {"models", "repetitions", "report", "force"}


def bench_machine(ctx: click.Context, arguments: BenchArguments) -> int:
    """Measure, write the file and return the exit code. Raises UsageError for options of other benchmarks."""
    others = [flag for name, flag in typed_options(ctx).items() if name not in _ACCEPTED]
    if others:
        raise UsageError(f"--report {arguments.report} has fixed tests: leave out {', '.join(others)}")
    host = machine()
    if str(arguments.report) == "mac" and host.backend != "metal":
        raise UsageError("--report mac needs a Mac's GPU", "`--report machine` measures any machine")
    path = Path(f"measured-{re.sub('[^a-z0-9]+', '-', host.device_name.lower()).strip('-')}.toml")
    check_output(path, "--report")
    names = arguments.models or _agreed(_fitting())
    report = _MachineReport(path, arguments)
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


class _MachineReport:
    """The file and its figures so far.

    documents: of the models that were measured, in the order of `models`.
    models: their names.
    interrupted: Ctrl-C ended a measurement; the caller ends the run.
    """

    def __init__(self, path: Path, arguments: BenchArguments) -> None:
        self._path = path
        self._arguments = arguments
        self._verification: VerifyDocument | None = None
        self._notes: list[str] = []
        self.documents: list[RunDocument] = []
        self.models: list[str] = []
        self.interrupted = False

    def measure(self, name: str, host: Machine) -> None:
        """Measure one model. One that fails is noted."""
        arguments = self._arguments
        if host.backend != "cpu":  # MLX has no fast kernels for CPUs: mlx-lm is compared on GPUs alone
            arguments = replace(arguments, peers=("mlx-lm",))
        options = MeasureOptions(
            models=[name],
            tests=plan([PROMPT], [GENERATE], DEPTHS, combined=False, batches=[1], arrivals=[0]),
            rounds=arguments.repetitions or ROUNDS,
            force=arguments.force,
            peers=chosen_peers(arguments, "f16"),
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
            loaded = load_with_notes(resolved_model(name, quiet=False), ModelSpec(force=self._arguments.force))
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
