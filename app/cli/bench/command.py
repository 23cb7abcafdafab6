"""`headrace bench`: measurements of this machine, and their comparison.

Results are a table on a terminal and Markdown elsewhere, or the form asked for. Ctrl-C prints the results so far and
exits with 130. There are three kinds of runs: speed (`_measure`), quality of formats (`_measure_quality`), and the
fixed tests of `machine.py`.

Guard: tests/app/cli/test_bench.py.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.app.cli.awake import keep_awake
from headrace.app.cli.bench.options import BenchArguments, bench_options, chosen_peers, typed_options
from headrace.app.cli.completion import files
from headrace.app.cli.decorators import json_option
from headrace.app.cli.load_for_answers import install_file
from headrace.app.cli.say import checked_json, print_json, say
from headrace.runtime.errors import INTERRUPTED, EngineError, UsageError

if TYPE_CHECKING:
    from headrace.app.bench.measure.open_engines import MeasureOptions
    from headrace.app.bench.measure.plan import Test
    from headrace.app.bench.measure.records import RunDocument

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
    arguments = BenchArguments(**options)
    if arguments.as_json:
        # Before the work, all that the document names: a path may be no UTF-8.
        hosts = arguments.hosts and arguments.hosts.hosts
        text = arguments.text and arguments.text.name
        checked_json([arguments.models, arguments.against, arguments.draft, arguments.llama_model, hosts, text])
    others = arguments.quality or arguments.peers or arguments.profile or arguments.threads or len(arguments.models) > 1
    several_formats = arguments.kv is not None and "," in arguments.kv
    if arguments.hosts is not None and (others or several_formats):
        raise UsageError(
            "--hosts measures one model of headrace alone",
            "leave out --quality, --vs, --profile, other models and K/V formats, and --threads for HEADRACE_THREADS",
        )
    if arguments.quality:
        return _measure_quality(ctx, arguments)
    if str(arguments.report) in ("mac", "machine"):
        from headrace.app.cli.bench.machine import bench_machine

        return bench_machine(ctx, arguments)
    _check_modes(ctx, arguments)
    return _measure(arguments)


def _check_modes(ctx: click.Context, arguments: BenchArguments) -> None:
    """Raise UsageError for options that belong to --quality or --speculate, or do not go with it."""
    if arguments.against or arguments.text:
        raise UsageError("--against and --text go with --quality")
    if arguments.speculate:
        typed = typed_options(ctx)
        for name, flag in _LENGTHS.items():
            if name in typed:
                raise UsageError(f"--speculate measures workloads of fixed lengths: leave {flag} out")
        return
    if arguments.workloads:
        raise UsageError("--workload needs --speculate")
    if arguments.draft is not None:
        raise UsageError("--draft needs --speculate")


@bench.command()
@click.argument("a", type=Path, shell_complete=files)
@click.argument("b", type=Path, shell_complete=files)
@json_option
def compare(a: Path, b: Path, as_json: bool) -> int:
    """List the tests in which B differs significantly from A. Exit code 1 if any test of B is slower.

    A and B are files of --json.
    """
    from headrace.app.bench.compare import compare_documents, read_document
    from headrace.app.bench.show.terminal_views import comparison_lines, show_comparison

    comparison = compare_documents(read_document(a), read_document(b))
    if as_json:
        print_json(comparison)
    elif sys.stdout.isatty():
        show_comparison(comparison)
    else:
        say("\n".join(comparison_lines(comparison)))
    return 1 if any(row.verdict == "slower" for row in comparison.tests) else 0


def _measure(arguments: BenchArguments) -> int:
    """Run the benchmark, print and report it; return the exit code."""
    from headrace.app.bench.measure.run import run
    from headrace.app.bench.show.live import live_view

    options = _run_options(arguments)
    if arguments.report is not None:
        from headrace.app.bench.show.html_report import check_report_path

        check_report_path(arguments.report)
    for model in (*options.models, options.draft):
        install_file(model)
    with live_view() as show:
        document = run(options, show)
    _print_run(document, arguments.chosen_form)
    if arguments.report is not None:
        _write_report(document, arguments.report)
    if document.interrupted:
        return INTERRUPTED
    _require_peers(document, [peer.engine for peer in options.peers])
    return 1 if document.identity is not None and document.identity.broken else 0


def _run_options(arguments: BenchArguments) -> "MeasureOptions":
    """Check the options and plan the run. Raises UsageError."""
    from headrace.app.bench.measure.kv_formats import check_formats
    from headrace.app.bench.measure.open_engines import MeasureOptions
    from headrace.app.config.settings import chosen_model, load_settings

    tests = _tests(arguments)
    settings = load_settings()
    formats = list(dict.fromkeys(name.strip() for name in (arguments.kv or settings.chat.kv).split(",")))
    check_formats(formats, arguments.peers)
    return MeasureOptions(
        models=arguments.models or (chosen_model(None, settings),),
        tests=tests,
        rounds=arguments.repetitions,
        threads=arguments.threads,
        peer_threads=arguments.peer_threads,
        force=arguments.force,
        profile=arguments.profile,
        peers=chosen_peers(arguments, formats[0]),
        kv=formats,
        activations=arguments.activations or settings.chat.activations,
        draft=arguments.draft,
        hosts=arguments.hosts,
    )


def _tests(arguments: BenchArguments) -> "list[Test]":
    from headrace.app.bench.measure.plan import parse_counts, plan, plan_speculation
    from headrace.app.bench.measure.workloads import chosen_workloads

    batches = parse_counts(arguments.batches, "--batch")
    arrivals = parse_counts(arguments.arrivals, "--arrivals")
    _check_peers(arguments, batches, arrivals)
    if arguments.speculate:
        return plan_speculation(chosen_workloads(arguments.workloads), batches)
    return plan(
        parse_counts(arguments.prompts, "-p"),
        parse_counts(arguments.generates, "-n"),
        parse_counts(arguments.depths, "-d"),
        combined=arguments.combined,
        batches=batches,
        arrivals=arrivals,
    )


def _check_peers(arguments: BenchArguments, batches: Sequence[int], arrivals: Sequence[int]) -> None:
    """Raise UsageError for tests that a peer cannot run."""
    if not arguments.peers:
        return
    if any(arrivals):
        raise UsageError("--arrivals is measured with headrace alone: leave --vs out")
    no_python = "llama.cpp" in arguments.peers and arguments.llama_python is None
    if arguments.speculate:
        if "mlx-lm" in arguments.peers:
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
    from headrace.app.bench.show.formats import markdown
    from headrace.app.bench.show.terminal_views import show_run

    _print(document, form, show_run, markdown)


def _print(
    document: Document, form: str | None, print_table: Callable[[Document], None], markdown: Callable[[Document], str]
) -> None:
    """Print a document.

    form: "table", "md" or "json"; None: the table on a terminal, Markdown elsewhere.
    print_table: prints the table.
    markdown: returns the text in Markdown.
    """
    if form is None:
        form = "table" if sys.stdout.isatty() else "md"
    if form == "json":
        print_json(document)
    elif form == "table":
        print_table(document)
    else:
        say(markdown(document))


def _measure_quality(ctx: click.Context, arguments: BenchArguments) -> int:
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
    if len(arguments.models) > 1:
        raise UsageError("--quality takes one model with -m", "--against names models to compare with it")
    scored = [SCORED]
    if "generates" in typed:
        scored = parse_counts(arguments.generates, "-n")
    if len(scored) > 1 or scored[0] < 2:
        raise UsageError("with --quality, -n takes one number of tokens to score, 2 or more")
    depths = None
    if "depths" in typed:
        depths = parse_counts(arguments.depths, "-d")
    formats = None
    if arguments.kv is not None:
        formats = [name.strip() for name in arguments.kv.split(",")]
    model = chosen_model(next(iter(arguments.models), None), load_settings())
    for name in (model, *arguments.against):
        install_file(name)
    measured = run(
        QualityOptions(
            model=model,
            kv=formats,
            coarse=arguments.activations in ("8", "auto"),
            against=arguments.against,
            depths=depths,
            scored=scored[0],
            text=arguments.text,
            force=arguments.force,
            threads=arguments.threads,
        )
    )
    _print(measured, arguments.chosen_form, show.show, show.markdown)
    return INTERRUPTED if measured.interrupted else 0


def _write_report(document: "RunDocument", path: Path) -> None:
    from headrace.app.bench.show.html_report import html
    from headrace.app.output.output_file import write_output

    write_output(path, html(document))
    say(f"report written to {path}", err=True)
