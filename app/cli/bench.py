"""`headrace bench`: measure this machine; compare two measurements; look at earlier ones.

Options in, `app.bench` does the work, results out: the table on a terminal, Markdown elsewhere, or one of the formats
asked for. Ctrl-C prints what is done and exits with 130.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headrace.app.cli.bench_forms import print_document
from headrace.app.cli.completion import model_names
from headrace.app.cli.json_output import print_json
from headrace.app.cli.say import say
from headrace.runtime.errors import EngineError, UsageError

_LENGTHS = ("-p", "-n", "-d", "--pg", "--arrivals")  # of what is measured without --speculate
FORMATS = ("table", "md", "csv", "json", "jsonl")


@click.group(invoke_without_command=True)
@click.option(
    *("-m", "--model", "models"),
    multiple=True,
    metavar="MODEL",
    shell_complete=model_names,
    help="As for run, HEADRACE_MODEL and settings included. Repeatable.",
)
@click.option("-p", "--prompt", "prompts", default="512", metavar="N,...", help="Prompt lengths to prefill [512].")
@click.option("-n", "--generate", "generates", default="128", metavar="N,...", help="How many tokens to decode [128].")
@click.option("-d", "--depth", "depths", default="0", metavar="N,...", help="Tokens already in the KV cache [0].")
@click.option("--batch", "batches", default="1", metavar="N,...", help="Sequences that decode together [1].")
@click.option("--arrivals", default="0", metavar="N,...", help="Prompts that join others, which decode [none].")
@click.option("--speculate", is_flag=True, help="Measure what speculation gives, on the workloads made for that.")
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="One of them alone. Repeatable.")
@click.option(
    "--draft", metavar="MODEL", shell_complete=model_names, help="What guesses for -m, not what was said before."
)
@click.option("--pg/--no-pg", "combined", default=True, help="Also test prompt + generation [yes].")
@click.option("-r", "--repetitions", type=click.IntRange(1), metavar="N", help="Rounds [5, more where it is noisy].")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads of every engine [cores].")
@click.option("--peer-threads", type=click.IntRange(1, 1024), metavar="N", help="Another number for the peers.")
@click.option(
    "--vs",
    "peers",
    multiple=True,
    type=click.Choice(["mlx-lm", "llama.cpp"]),
    metavar="PEER",
    help="mlx-lm or llama.cpp. Repeatable.",
)
@click.option("--llama-python", metavar="PYTHON", help="One with llama-cpp-python, for llama-bench.")
@click.option("--llama-model", metavar="FILE", help="What llama.cpp reads, if -m is no GGUF.")
@click.option("--mlx-python", metavar="PYTHON", help="One with mlx-lm, for this one.")
@click.option("--quality", is_flag=True, help="What formats of K/V do to what the model says, instead of speed.")
@click.option("--kv", metavar="FORMAT,...", help="How K/V are stored: f16, q8, k8v4, q4, or auto; several: compared.")
@click.option("--against", multiple=True, metavar="MODEL", help="With --quality: also other weights. Repeatable.")
@click.option("--text", type=Path, metavar="FILE", help="With --quality: another text than the one shipped.")
@click.option("--profile", is_flag=True, help="Attribute one step's time to its parts.")
@click.option("-o", "--output", "form", metavar="FORM", type=click.Choice(FORMATS), help="table, md, csv, json, jsonl.")
@click.option("--json", "as_json", is_flag=True, help="As -o json: one JSON document.")
@click.option("--report", type=Path, metavar="FILE", help="Write a page with plots.")
@click.option("--save", is_flag=True, help="Keep the results for `headrace bench history`.")
@click.option("--force", is_flag=True, help="Load even if memory looks too small.")
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> int:
    """Measure prefill and decode speed, and how close decoding comes to the memory's limit.

    With --speculate: answers with speculation and without, side by side. Exit code 1 if it changed a token where that
    must not be.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    if options["quality"]:
        from headrace.app.cli.bench_quality import bench_quality

        return bench_quality(ctx, options)
    if options.pop("against") or options.pop("text"):
        raise UsageError("--against and --text go with --quality")
    del options["quality"]
    if options["workloads"] and not options["speculate"]:
        raise UsageError("--workload goes with --speculate")
    if options["draft"] is not None and not options["speculate"]:
        raise UsageError("--draft goes with --speculate")
    if options["speculate"] and (given := [name for name in _LENGTHS if _given(ctx, name)]):
        raise UsageError(f"--speculate measures workloads, which have lengths of their own: leave {given[0]} out")
    return _bench(**options)


def _given(ctx: click.Context, option: str) -> bool:
    """Whether the command line has it."""
    name = next(name for name, options in _parameters(ctx) if option in options)
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _parameters(ctx: click.Context) -> list[tuple[str, list[str]]]:
    return [(str(parameter.name), parameter.opts) for parameter in ctx.command.params]


@bench.command()
@click.argument("a", type=click.Path(exists=True, dir_okay=False))
@click.argument("b", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare(a: str, b: str, as_json: bool) -> int:
    """Say which tests of B differ significantly from A. Exit code 1 if any test of B is slower."""
    from headrace.app.bench.compare.documents import compare_documents
    from headrace.app.bench.compare.stored import read_document
    from headrace.app.bench.show.compare_view import lines, show

    comparison = compare_documents(read_document(Path(a)), read_document(Path(b)))
    if as_json:
        print_json(comparison)
    elif sys.stdout.isatty():
        show(comparison)
    else:
        say("\n".join(lines(comparison)))
    return 1 if any(row["verdict"] == "slower" for row in comparison["tests"]) else 0


@bench.command()
@click.option("--show", "number", type=click.IntRange(1), metavar="ID", help="Show this run again.")
@click.option("--delete", type=click.IntRange(1), metavar="ID", help="Forget this run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def history(number: int | None, delete: int | None, as_json: bool) -> None:
    """List the saved runs, and how each test's speed went over time."""
    from headrace.app.bench.compare.history import History
    from headrace.app.bench.show.history_view import show_history

    with History() as kept:
        if delete is not None:
            kept.delete(delete)
        elif number is not None:
            _print(kept.get(number), "json" if as_json else None)
        elif as_json:
            print_json([document for _, document in kept.documents()])
        else:
            show_history(kept)


def _bench(
    models: tuple[str, ...],
    prompts: str,
    generates: str,
    depths: str,
    batches: str,
    arrivals: str,
    speculate: bool,
    workloads: tuple[str, ...],
    draft: str | None,
    combined: bool,
    repetitions: int | None,
    threads: int | None,
    peer_threads: int | None,
    kv: str | None,
    form: str | None,
    as_json: bool,
    report: Path | None,
    save: bool,
    profile: bool,
    force: bool,
    **peer_options: Any,
) -> int:
    from headrace.app.bench.measure.kv_formats import check_formats
    from headrace.app.bench.measure.plan import parse_counts, plan, plan_speculation
    from headrace.app.bench.measure.run import Options, run
    from headrace.app.bench.measure.workloads import chosen_workloads
    from headrace.app.bench.show.live import live_view
    from headrace.app.config.settings import chosen_model, load_settings

    together = parse_counts(batches, "--batch")
    joining = parse_counts(arrivals, "--arrivals")
    if any(joining) and peer_options["peers"]:
        raise UsageError("--arrivals is measured with headrace alone: leave --vs out")
    if speculate and peer_options["peers"]:
        _check_guessing_peers(together, **peer_options)
    elif max(together) > 1 and peer_options["peers"]:
        _check_batch_peers(**peer_options)
    tests = (
        plan_speculation(chosen_workloads(workloads), together)
        if speculate
        else plan(
            parse_counts(prompts, "-p"),
            parse_counts(generates, "-n"),
            parse_counts(depths, "-d"),
            combined=combined,
            batches=together,
            arrivals=joining,
        )
    )
    settings = load_settings()
    formats = list(dict.fromkeys(name.strip() for name in (kv or settings.chat.kv).split(",")))
    check_formats(formats, peer_options["peers"])
    options = Options(
        models=models or (chosen_model(None, settings),),
        tests=tests,
        rounds=repetitions,
        threads=threads,
        peer_threads=peer_threads,
        force=force,
        profile=profile,
        peers=_peers(models, peer_threads, formats[0], **peer_options),
        kv=formats,
        draft=draft,
    )
    if report is not None:
        from headrace.app.bench.show.report import check_report_path

        check_report_path(report)
    with live_view() as show:
        document = run(options, show)
    _print(document, "json" if as_json else form)
    if report is not None:
        _write_report(document, report)
    if save:
        from headrace.app.bench.compare.history import History

        with History() as kept:
            click.echo(f"saved as run {kept.add(document)}; `headrace bench history` lists them", err=True)
    if document["interrupted"]:
        return 130
    _require_peers(document, [peer.engine for peer in options.peers])
    return 1 if (document["identity"] or {}).get("broken") else 0


def _require_peers(document: dict[str, Any], engines: list[str]) -> None:
    """Raises EngineError for a comparison that was asked for and did not happen."""
    measured = {entry["engine"] for entry in document["results"]}
    for engine in engines:
        if engine not in measured:
            reason = next((note for note in document["notes"] if note.startswith(f"{engine} is left out")), engine)
            raise EngineError(f"not compared with {engine}: {reason.partition(': ')[2]}")


def _check_batch_peers(peers: tuple[str, ...], llama_python: str | None, **_others: Any) -> None:
    """Raises UsageError for a peer whose sequences cannot be measured together."""
    if "llama.cpp" in peers and llama_python is None:
        raise UsageError("llama-bench has no parallel sequences", "--llama-python PYTHON names one that has")


def _check_guessing_peers(
    together: Sequence[int], peers: tuple[str, ...], llama_python: str | None, **_others: Any
) -> None:
    """Raises UsageError for a peer that has no prompt lookup, or not as it is asked for."""
    if "mlx-lm" in peers:
        raise UsageError("mlx-lm has no prompt lookup to compare with: --speculate goes with --vs llama.cpp")
    if llama_python is None:
        raise UsageError("llama-bench has no prompt lookup", "--llama-python PYTHON names one that has")
    if max(together) > 1:
        raise UsageError("llama-cpp-python's prompt lookup takes one sequence: leave --batch out")


def _peers(
    models: tuple[str, ...],
    peer_threads: int | None,
    kv: str,
    peers: tuple[str, ...],
    llama_python: str | None,
    llama_model: str | None,
    mlx_python: str | None,
) -> list[Any]:
    from headrace.app.bench.measure.peers import Peer

    if peer_threads and not peers:
        raise UsageError("--peer-threads goes with --vs")
    if (llama_python or llama_model) and "llama.cpp" not in peers:
        raise UsageError("--llama-python and --llama-model go with --vs llama.cpp")
    if llama_model and not Path(llama_model).is_file():
        raise UsageError(f"no such file: {llama_model}")
    gguf = llama_model or next((model for model in models[:1] if model.lower().endswith(".gguf")), None)
    known = {"mlx-lm": Peer("mlx-lm", mlx_python), "llama.cpp": Peer("llama.cpp", llama_python, gguf, kv)}
    return [known[name] for name in dict.fromkeys(peers)]


def _print(document: dict[str, Any], form: str | None) -> None:
    """On standard output, in the form asked for."""
    from headrace.app.bench.show import formats
    from headrace.app.bench.show.summary_view import show

    writers = {"md": formats.markdown, "csv": formats.csv_text, "jsonl": formats.json_lines}
    print_document(document, form, show, writers)


def _write_report(document: dict[str, Any], path: Path) -> None:
    from headrace.app.bench.show.report import html
    from headrace.app.output.output_file import write_output

    write_output(path, html(document))
    say(f"report written to {path}", err=True)
