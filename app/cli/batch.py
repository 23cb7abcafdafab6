"""`headrace batch`: a file of requests in, a file of results out, as many side by side as the engine runs.

The order of work is the order of the file: read the lines, look at what the output has already, get the model, answer
what is left, say what it came to. Results go to standard output or into a file; everything else to standard error.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.app.answer.sampling_options import DEFAULT_MAX_TOKENS, sampling_options
from headrace.app.cli.completion import model_names
from headrace.app.cli.draft import chosen_draft, draft_option, load_draft
from headrace.app.cli.say import say
from headrace.app.config.kv_option import kv_option
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.batch.line import BadLine, Defaults, Line
    from headrace.app.batch.output import Output
    from headrace.app.batch.run import Tally
    from headrace.app.batch.summary import BatchReport
    from headrace.models.loading.load import LoadedModel
    from headrace.models.registry.resolve import ResolvedModel
    from headrace.runtime.engine.request import CancelFlag
    from headrace.runtime.network import Network

STDOUT = "-"
PARALLEL = 16


@click.command()
@click.argument("source", metavar="IN.jsonl", required=False)
@click.option("-o", "--output", metavar="OUT.jsonl", help="Write results there, and go on where it stopped.")
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    shell_complete=model_names,
    help="As for run. Given here, it answers every line, whatever model a line names.",
)
@click.option("-s", "--system", metavar="TEXT", help="System message of lines that have none.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), help=f"At most this many tokens [{DEFAULT_MAX_TOKENS}].")
@sampling_options
@draft_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End answers before this text. Repeatable.")
@click.option("--thinking/--no-thinking", default=None, help="Whether a reasoning model that can be told thinks first.")
@click.option("--raw", is_flag=True, help="No chat template: continue prompts as they are.")
@click.option("--parallel", type=click.IntRange(1, 256), default=PARALLEL, help=f"Requests at a time [{PARALLEL}].")
@click.option("--in-order", is_flag=True, help="Results in the order of the lines; else as they finish.")
@click.option("--context", type=click.IntRange(1), help="Context limit in tokens. Default: what the model allows.")
@kv_option
@click.option("--force", is_flag=True, help="Go beyond what memory, or with --context the model, allows.")
@click.option("--json", "as_json", is_flag=True, help="With -o: print the summary as one JSON document.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing but results and errors: no progress, no summary.")
def batch(
    source: str | None,
    output: str | None,
    model: str | None,
    system: str | None,
    draft: str | None,
    raw: bool,
    parallel: int,
    in_order: bool,
    context: int | None,
    kv: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> int:
    """Answer every line of IN.jsonl (`-`: standard input) and write a line of results for each.

    A line is {"prompt": "Why?"} or {"messages": [...]}, with options of its own ("temperature": 0.7, "max_tokens": 64);
    or a request in the OpenAI batch form, whose result has that form too. What a line does not say is as for `run`. A
    line that cannot be answered has a result with an error, and the exit code is 1. With -o, Ctrl-C keeps what is
    finished, and the same command again goes on from there.
    """
    if as_json and output in (None, STDOUT):
        raise UsageError("--json is the summary, which goes where the results do not", "give -o OUT.jsonl")
    if raw and (system or sampling["thinking"] is not None):
        raise UsageError("--raw has no place for a system message, nor for --thinking")
    # Kept out of the module's head: `headrace batch --help` needs none of it.
    from headrace.app.batch.input import read_lines
    from headrace.app.batch.options import options_for_all
    from headrace.app.batch.output import ResultFile
    from headrace.app.batch.parse import parse_lines
    from headrace.app.batch.run import Tally
    from headrace.app.cli.interrupts import first_interrupt_cancels
    from headrace.app.cli.load_for_answers import load_noted, resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.runtime.engine.request import CancelFlag

    settings = load_settings()
    draft = chosen_draft(draft, settings.chat.draft, sampling)
    options = options_for_all(sampling, settings.sampling_given)
    raw_lines = read_lines(source)
    cancel = CancelFlag()
    with ExitStack() as stack:
        file = None if output in (None, STDOUT) else stack.enter_context(closing(ResultFile(Path(str(output)))))
        resolved = resolved_model(chosen_model(model, settings), quiet=quiet)
        context = context or settings.chat.context or None
        told = settings.chat.system if system is None else system
        lines = parse_lines(raw_lines, _defaults(resolved, options, told, context, raw=raw, given=model))
        if file is not None:
            file.begin({line.digest: line.number for line in lines}, in_order=in_order)
        left = [line for line in lines if file is None or line.digest not in file.answered]
        tally = Tally(total=len(lines), kept=len(lines) - len(left))
        if left:
            loaded = load_noted(resolved, context=context, kv=kv or settings.chat.kv, force=force)
            guessing = load_draft(draft, loaded, quiet=quiet)
            stack.enter_context(first_interrupt_cancels(cancel))
            _answer(resolved, loaded, guessing, left, file, tally, cancel, parallel, in_order=in_order, quiet=quiet)
    if not quiet or as_json:
        _summarise(_report(resolved, tally, parallel), as_json=as_json)
    return 130 if tally.left else 1 if tally.failed else 0


def _defaults(
    resolved: "ResolvedModel",
    options: Mapping[str, Any],
    system: str,
    context: int | None,
    *,
    raw: bool,
    given: str | None,
) -> "Defaults":
    """given: the model as the command line calls it; None where it does not."""
    from headrace.app.batch.line import Defaults

    return Defaults(
        options=options,
        system=system,
        raw=raw,
        model=resolved.name,
        names=None if given is not None else frozenset(filter(None, (resolved.name, resolved.stored_as))),
        identity=f"{resolved.origin}, context {context}",
    )


def _answer(
    resolved: "ResolvedModel",
    loaded: "LoadedModel",
    draft: "Network[Any] | None",
    lines: "list[Line | BadLine]",
    file: "Output | None",
    tally: "Tally",
    cancel: "CancelFlag",
    parallel: int,
    *,
    in_order: bool,
    quiet: bool,
) -> None:
    """Answer the lines, into the file or on standard output, until there are none left or `cancel` is set."""
    from headrace.app.batch.answering import Asking
    from headrace.app.batch.output import ResultStream
    from headrace.app.batch.progress import ProgressLine
    from headrace.app.batch.run import Batch
    from headrace.app.cli.load_for_answers import raise_damage
    from headrace.models.registry.background_check import BackgroundCheck
    from headrace.models.text.chat_prompt import ChatPrompt
    from headrace.runtime.engine.engine import Engine
    from headrace.runtime.speculation.pass_costs import PassCostStore

    raise_damage(BackgroundCheck(resolved))
    costs = PassCostStore(loaded.network.cost)
    engine = Engine(
        loaded.network, context_limit=loaded.context_limit, most_running=parallel, draft=draft, pass_costs=costs
    )
    asking = Asking(loaded, ChatPrompt(loaded.tokenizer), drafted=draft is not None)
    progress = ProgressLine(quiet=quiet)
    numbers = [line.number for line in lines] if in_order else None
    output = ResultStream(sys.stdout, numbers, progress.before(sys.stdout)) if file is None else file
    try:
        Batch(engine, asking, lines, output, tally, parallel).run(cancel, progress)
    finally:
        progress.clear()
        if file is None:
            output.close()


def _report(resolved: "ResolvedModel", tally: "Tally", parallel: int) -> "BatchReport":
    from headrace.app.batch.summary import BatchReport
    from headrace.app.versions import versions
    from headrace.runtime import ops

    return BatchReport(
        model=resolved.name,
        parallel=parallel,
        tally=tally,
        kernels=ops.describe(),
        versions=versions(),
    )


def _summarise(report: "BatchReport", *, as_json: bool) -> None:
    from headrace.app.batch.summary import document, sentences, waits_table
    from headrace.app.cli.json_output import print_json
    from headrace.app.output.tables import print_lines, table_lines
    from headrace.app.output.terminal import table_width

    if as_json:
        print_json(document(report))
        return
    for line in sentences(report):
        say(line, err=True)
    columns = waits_table(report)
    if columns:
        print_lines(table_lines(columns, table_width(sys.stderr), rule=False), stderr=True)
