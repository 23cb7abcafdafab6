"""`headrace bench`: measurements of this machine, their comparison and history.

Results are a table on a terminal and Markdown elsewhere, or the form asked for. Ctrl-C prints the results so far and
exits with 130. There are three kinds of runs: speed (`_measure`), quality of formats (`_measure_quality`), and the
fixed tests of `machine.py`.

Guard: tests/app/cli/test_bench.py.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.app.cli.awake import keep_awake
from headrace.app.cli.bench.options import BenchOptions, bench_options, chosen_peers, typed_options
from headrace.app.cli.completion import files
from headrace.app.cli.load_for_answers import install_file
from headrace.app.cli.model_options import json_option
from headrace.app.cli.say import print_json, say
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.bench.compare.history import History
    from headrace.app.bench.measure.plan import Test
    from headrace.app.bench.measure.records import RunDocument
    from headrace.app.bench.measure.run import MeasureOptions

Document = TypeVar("Document")

# Parameters of lengths, and their flags. --speculate refuses them: its workloads have fixed lengths.
_LENGTHS = {"prompts": "-p", "generates": "-n", "depths": "-d", "combined": "--pg", "arrivals": "--arrivals"}
# Parameters that --quality takes; it refuses all others that were typed.
_WITH_QUALITY = {
    *("models", "depths", "generates", "form", "as_json", "force", "threads", "quality", "kv", "against", "text"),
    "activations",
}


@click.group(invoke_without_command=True)
@bench_options
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> int:
    """Measure prefill and decode speed, and the share of memory bandwidth that decoding reaches.

    With --speculate, compares answers with and without speculation. Exit code 1 if it changed a token that must not
    change.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    keep_awake()
    given = BenchOptions(**options)
    others = given.quality or given.peers or given.profile or given.threads or len(given.models) > 1
    several_formats = given.kv is not None and "," in given.kv
    if given.hosts is not None and (others or several_formats):
        raise UsageError(
            "--hosts measures one model of headrace alone",
            "leave out --quality, --vs, --profile, other models and K/V formats, and --threads for HEADRACE_THREADS",
        )
    if given.quality:
        return _measure_quality(ctx, given)
    if str(given.report) in ("mac", "machine"):
        from headrace.app.cli.bench.machine import bench_machine

        return bench_machine(ctx, given)
    _check_modes(ctx, given)
    return _measure(given)


def _check_modes(ctx: click.Context, given: BenchOptions) -> None:
    """Raise UsageError for options that belong to --quality or --speculate, or do not go with it."""
    if given.against or given.text:
        raise UsageError("--against and --text go with --quality")
    if given.speculate:
        typed = typed_options(ctx)
        for name, flag in _LENGTHS.items():
            if name in typed:
                raise UsageError(f"--speculate measures workloads of fixed lengths: leave {flag} out")
        return
    if given.workloads:
        raise UsageError("--workload needs --speculate")
    if given.draft is not None:
        raise UsageError("--draft needs --speculate")


@bench.command()
@click.argument("a", shell_complete=files)
@click.argument("b", shell_complete=files)
@json_option
def compare(a: str, b: str, as_json: bool) -> int:
    """List the tests in which B differs significantly from A. Exit code 1 if any test of B is slower.

    A and B are files of --json or numbers of saved runs.
    """
    from headrace.app.bench.compare.documents import compare_documents
    from headrace.app.bench.show.terminal_views import comparison_lines, show_comparison

    comparison = compare_documents(_stored(a), _stored(b))
    if as_json:
        print_json(comparison)
    elif sys.stdout.isatty():
        show_comparison(comparison)
    else:
        say("\n".join(comparison_lines(comparison)))
    return 1 if any(row.verdict == "slower" for row in comparison.tests) else 0


def _stored(name: str) -> "RunDocument":
    """Return the document of a file, or of a saved run. Raises UsageError if there is neither."""
    from headrace.app.bench.compare.documents import read_document

    if name.isascii() and name.isdigit() and not Path(name).exists():
        with _history() as runs:
            return runs.get(int(name)).document
    return read_document(Path(name))


@bench.command()
@click.option("--show", "number", type=click.IntRange(1), metavar="ID", help="Show this run again.")
@click.option("--delete", type=click.IntRange(1), metavar="ID", help="Delete this run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def history(number: int | None, delete: int | None, as_json: bool) -> None:
    """List the saved runs, with the speed of each test."""
    from headrace.app.bench.compare.history import History
    from headrace.app.bench.show.terminal_views import show_history

    with History() as runs:
        if delete is not None:
            runs.delete(delete)
        elif number is not None:
            saved = runs.get(number)
            if as_json:
                print_json(json.loads(saved.text))
            else:
                _print_run(saved.document, None)
        elif as_json:
            print_json([json.loads(saved.text) for saved in runs.runs()])
        else:
            show_history(runs)


def _measure(given: BenchOptions) -> int:
    """Run the benchmark, print, report and save it; return the exit code."""
    from headrace.app.bench.measure.run import run
    from headrace.app.bench.show.live import live_view

    options = _run_options(given)
    if given.report is not None:
        from headrace.app.bench.show.html_report import check_report_path

        check_report_path(given.report)
    if given.save:
        with _history():  # a run takes minutes: fail before it
            pass
    for model in (*options.models, options.draft):
        install_file(model)
    with live_view() as show:
        document = run(options, show)
    _print_run(document, given.chosen_form)
    failed = _keep(document, given)
    if failed is not None:
        raise failed
    if document.interrupted:
        return 130
    _require_peers(document, [peer.engine for peer in options.peers])
    return 1 if document.identity is not None and document.identity.broken else 0


def _keep(document: "RunDocument", given: BenchOptions) -> HeadraceError | None:
    """Save the run and write the report, each also if the other fails. Return the first error."""
    failed: list[HeadraceError] = []
    for wanted, keep in ((given.save, _save), (given.report is not None, _write_report)):
        try:
            if wanted:
                keep(document, given)
        except HeadraceError as error:
            failed.append(error)
    for other in failed[1:]:
        say(f"headrace: {other}", err=True)
    return next(iter(failed), None)


def _history() -> "History":
    from headrace.app.bench.compare.history import History

    return History()


def _save(document: "RunDocument", _: BenchOptions) -> None:
    with _history() as runs:
        click.echo(f"saved as run {runs.add(document)}; `headrace bench history` lists them", err=True)


def _run_options(given: BenchOptions) -> "MeasureOptions":
    """Check the options and plan the run. Raises UsageError."""
    from headrace.app.bench.measure.kv_formats import check_formats
    from headrace.app.bench.measure.run import MeasureOptions
    from headrace.app.config.settings import chosen_model, load_settings

    tests = _tests(given)
    settings = load_settings()
    formats = list(dict.fromkeys(name.strip() for name in (given.kv or settings.chat.kv).split(",")))
    check_formats(formats, given.peers)
    return MeasureOptions(
        models=given.models or (chosen_model(None, settings),),
        tests=tests,
        rounds=given.repetitions,
        threads=given.threads,
        peer_threads=given.peer_threads,
        force=given.force,
        profile=given.profile,
        peers=chosen_peers(given, formats[0]),
        kv=formats,
        activations=given.activations or settings.chat.activations,
        draft=given.draft,
        hosts=given.hosts,
    )


def _tests(given: BenchOptions) -> "list[Test]":
    from headrace.app.bench.measure.plan import parse_counts, plan, plan_speculation
    from headrace.app.bench.measure.workloads import chosen_workloads

    batches = parse_counts(given.batches, "--batch")
    arrivals = parse_counts(given.arrivals, "--arrivals")
    _check_peers(given, batches, arrivals)
    if given.speculate:
        return plan_speculation(chosen_workloads(given.workloads), batches)
    return plan(
        parse_counts(given.prompts, "-p"),
        parse_counts(given.generates, "-n"),
        parse_counts(given.depths, "-d"),
        combined=given.combined,
        batches=batches,
        arrivals=arrivals,
    )


def _check_peers(given: BenchOptions, batches: Sequence[int], arrivals: Sequence[int]) -> None:
    """Raise UsageError for tests that a peer cannot run."""
    if not given.peers:
        return
    if any(arrivals):
        raise UsageError("--arrivals is measured with headrace alone: leave --vs out")
    no_python = "llama.cpp" in given.peers and given.llama_python is None
    if given.speculate:
        if "mlx-lm" in given.peers:
            raise UsageError("mlx-lm has no prompt lookup decoding: --speculate needs --vs llama.cpp")
        if no_python:
            raise UsageError("llama-bench has no prompt lookup decoding", "--llama-python PYTHON has it")
        if max(batches) > 1:
            raise UsageError("llama-cpp-python's prompt lookup takes one sequence: leave --batch out")
    elif max(batches) > 1 and no_python:
        raise UsageError("llama-bench has no parallel sequences", "--llama-python PYTHON has them")


def _require_peers(document: "RunDocument", engines: list[str]) -> None:
    """Raise EngineError if a requested peer was not measured.

    Its reason is a note: `peers.open_peers` and `BenchSession` begin theirs with the words that are looked for here.
    """
    measured = {entry.engine for entry in document.results}
    for engine in engines:
        if engine not in measured:
            reason = next((note for note in document.notes if note.startswith(f"{engine} is left out")), engine)
            raise EngineError(f"not compared with {engine}: {reason.partition(': ')[2]}")


def _print_run(document: "RunDocument", form: str | None) -> None:
    from headrace.app.bench.show.columns import csv_text
    from headrace.app.bench.show.formats import json_lines, markdown
    from headrace.app.bench.show.terminal_views import show_run

    _print(document, form, show_run, {"md": markdown, "csv": csv_text, "jsonl": json_lines})


def _print(
    document: Document,
    form: str | None,
    table: Callable[[Document], None],
    writers: Mapping[str, Callable[[Document], str]],
) -> None:
    """Print a document.

    form: "table", "json" or one of `writers`; None: the table on a terminal, "md" elsewhere.
    table: prints the table.
    writers: return the other forms.
    """
    if form is None and not sys.stdout.isatty():
        form = "md"
    if form in (None, "table"):
        table(document)
    elif form == "json":
        print_json(document)
    else:
        say(writers[form](document))


def _measure_quality(ctx: click.Context, given: BenchOptions) -> int:
    """Compare logits under K/V formats and other weights with a reference; return the exit code.

    Ctrl-C prints the finished conditions. Raises UsageError for options of speed measurements.
    """
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.bench.quality import show
    from headrace.app.bench.quality.quality_run import QualityOptions, run
    from headrace.app.bench.quality.text import SCORED
    from headrace.app.config.settings import chosen_model, load_settings

    typed = typed_options(ctx)
    others = [typed[name] for name in sorted(typed.keys() - _WITH_QUALITY)]
    if others:
        raise UsageError(f"--quality measures no speed: leave out {', '.join(others)}")
    if len(given.models) > 1:
        raise UsageError("--quality takes one model with -m", "--against names models to compare with it")
    scored = [SCORED]
    if "generates" in typed:
        scored = parse_counts(given.generates, "-n")
    if len(scored) > 1 or scored[0] < 2:
        raise UsageError("with --quality, -n takes one number of tokens to score, 2 or more")
    depths = None
    if "depths" in typed:
        depths = parse_counts(given.depths, "-d")
    formats = None
    if given.kv is not None:
        formats = [name.strip() for name in given.kv.split(",")]
    model = chosen_model(next(iter(given.models), None), load_settings())
    for name in (model, *given.against):
        install_file(name)
    measured = run(
        QualityOptions(
            model=model,
            kv=formats,
            coarse=given.activations in ("8", "auto"),
            against=given.against,
            depths=depths,
            scored=scored[0],
            text=given.text,
            force=given.force,
            threads=given.threads,
        )
    )
    writers = {"md": show.markdown, "csv": show.csv_text, "jsonl": show.json_lines}
    _print(measured, given.chosen_form, show.show, writers)
    return 130 if measured.interrupted else 0


def _write_report(document: "RunDocument", given: BenchOptions) -> None:
    from headrace.app.bench.show.html_report import html
    from headrace.app.output.output_file import write_output

    assert given.report is not None
    write_output(given.report, html(document))
    say(f"report written to {given.report}", err=True)
