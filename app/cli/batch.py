"""`headrace batch`: a file of requests in, a file of results out, many at a time.

Results go to standard output or into a file; everything else goes to standard error. The work is in `app.batch`: lines
are parsed before the model is loaded, so that a wrong file costs no time.

Guard: tests/app/cli/test_batch.py.
"""

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from headrace.app.answer import MAX_RUNNING
from headrace.app.answer.options import AnswerOptions, recommended_options, sampling_source
from headrace.app.cli.answer_options import answer_options
from headrace.app.cli.awake import keep_awake
from headrace.app.cli.completion import files
from headrace.app.cli.decorators import as_object
from headrace.app.cli.load_for_answers import load_draft
from headrace.app.cli.model_options import LoadArguments, model_options, named_model_option
from headrace.app.cli.say import print_json, say
from headrace.app.output.sanitise import sanitise
from headrace.runtime.errors import INTERRUPTED, CheckpointError, UsageError
from headrace.runtime.metrics.units import counted

if TYPE_CHECKING:
    from headrace.app.batch.output import ResultFile
    from headrace.app.batch.parse import BadLine, BatchDefaults, BatchLine
    from headrace.app.batch.run_batch import Tally
    from headrace.app.batch.summary import BatchReport
    from headrace.app.config.settings import Settings
    from headrace.models.loading.load import LoadedModel
    from headrace.models.registry.resolve import ResolvedModel
    from headrace.runtime.engine.request import CancelFlag
    from headrace.runtime.network import Network

STDOUT = "-"


class BatchArguments(Struct, frozen=True):
    """Arguments of `headrace batch`.

    source: file of requests; None: standard input.
    output: file of results; None: standard output.
    model: None: HEADRACE_MODEL or the settings'.
    system: system message of requests without one; None: the settings'.
    options: answer options of the command line.
    raw: prompts are plain text, without a chat template.
    parallel: most requests that are answered at a time.
    in_order: results in the order of the requests.
    load: options of loading.
    as_json: print a report as JSON.
    quiet: errors only.
    """

    source: str | None
    output: str | None
    model: str | None
    system: str | None
    options: AnswerOptions
    raw: bool
    parallel: int
    in_order: bool
    load: LoadArguments
    as_json: bool
    quiet: bool

    def check(self) -> None:
        """Raise UsageError for arguments that exclude each other."""
        if self.as_json and self.output in (None, STDOUT):
            raise UsageError("--json needs -o OUT.jsonl, since results go to standard output")
        if self.raw and (self.system or self.options.thinking is not None):
            raise UsageError("--raw excludes a system message and --thinking")


@click.command()
@click.argument("source", metavar="IN.jsonl", required=False, shell_complete=files)
@click.option(
    "-o",
    "--output",
    metavar="OUT.jsonl",
    shell_complete=files,
    help="File of results; an interrupted batch resumes there.",
)
@named_model_option("Model, as for run. Given here, it answers every line, whatever model a line names.")
@click.option("-s", "--system", metavar="TEXT", help="System message of lines that have none.")
@answer_options
@click.option("--raw", is_flag=True, help="No chat template: prompts are continued as they are.")
@click.option(
    "--parallel", type=click.IntRange(1, 256), default=MAX_RUNNING, help=f"Requests at a time [{MAX_RUNNING}]."
)
@click.option("--in-order", is_flag=True, help="Results in the order of the lines, not as they finish.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="With -o: the summary as one JSON document.")
@click.option("-q", "--quiet", is_flag=True, help="Results and errors only: no progress, no summary.")
@as_object(BatchArguments)
def batch(arguments: BatchArguments) -> int:
    """Answer every line of IN.jsonl (`-`: standard input) and write a line of results for each.

    A line is {"prompt": "Why?"} or {"messages": [...]}, with options of its own ("temperature": 0.7, "max_tokens": 64);
    or a request in the OpenAI batch form, with a result in that form. Options that a line lacks are as for `run`.
    A line that cannot be answered has a result with an error, and the exit code is 1. With -o, Ctrl-C keeps finished
    results, and the same command resumes the batch; changed lines are answered anew.
    """
    keep_awake()
    arguments.check()
    # Imported late: `headrace batch --help` needs none of it.
    from headrace.app.batch.output import ResultFile
    from headrace.app.batch.parse import parse_lines, read_lines
    from headrace.app.batch.run_batch import Tally
    from headrace.app.cli.interrupts import first_interrupt_cancels
    from headrace.app.cli.load_for_answers import load_with_notes, resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.runtime.engine.request import CancelFlag

    settings = load_settings()
    draft = arguments.load.chosen_draft(settings, arguments.options.speculate)
    spec = arguments.load.spec(settings, draft)
    raw_lines = read_lines(arguments.source)
    cancel = CancelFlag()
    # All lines are parsed, and the output is checked, before a model is loaded: that takes long.
    with ExitStack() as stack:
        file = None
        if arguments.output not in (None, STDOUT):
            file = stack.enter_context(closing(ResultFile(Path(str(arguments.output)))))
        resolved = resolved_model(chosen_model(arguments.model, settings), quiet=arguments.quiet)
        lines = parse_lines(raw_lines, _defaults(arguments, settings, resolved, spec.context))
        if file is not None:
            file.begin({line.digest: line.number for line in lines}, in_order=arguments.in_order)
            if file.replaced:
                say(_replaced_note(file), err=True)
        remaining = [line for line in lines if file is None or line.digest not in file.answered]
        tally = Tally(total=len(lines), kept=len(lines) - len(remaining))
        if remaining:
            loaded = load_with_notes(resolved, spec, quiet=arguments.quiet)
            draft_network = load_draft(draft, loaded, quiet=arguments.quiet)
            _raise_known_damage(resolved)
            stack.enter_context(first_interrupt_cancels(cancel))
            _answer(arguments, loaded, draft_network, remaining, file, tally, cancel)
    if not arguments.quiet or arguments.as_json:
        _summarise(_report(arguments, settings, resolved, tally), as_json=arguments.as_json)
    if tally.remaining:
        return INTERRUPTED
    if tally.failed:
        return 1
    return 0


def _replaced_note(file: "ResultFile") -> str:
    results = counted(file.replaced, "result")
    return f"{results} of changed or removed lines moved to {sanitise(str(file.replaced_path))}"


def _defaults(
    arguments: BatchArguments, settings: "Settings", resolved: "ResolvedModel", context: int | None
) -> "BatchDefaults":
    from headrace.app.batch.parse import BatchDefaults
    from headrace.app.config.settings import read_toml, settings_path
    from headrace.models.loading.recommended import catalog_sampling

    names: frozenset[str] | None = None
    if arguments.model is None:
        names = frozenset(filter(None, (resolved.name, resolved.stored_as)))
    system = arguments.system
    if system is None:
        system = settings.chat.system
    given = arguments.options.given()
    written = read_toml(settings_path()).get("sampling", {})
    return BatchDefaults(
        options=arguments.options.over(settings.sampling),
        written={key: value for key, value in written.items() if key not in given},
        recommended=catalog_sampling(resolved),
        system=system,
        raw=arguments.raw,
        model=resolved.name,
        names=names,
        identity=f"{resolved.origin}, context {context}, files {_files_identity(resolved)}",
    )


def _files_identity(model: "ResolvedModel") -> str:
    """Return the identity of the model's files and of its adapter's: a model may be retrained under its name."""
    from headrace.models.checkpoint.gguf_link import file_facts
    from headrace.models.registry.checksums import files_identity

    try:
        identity = files_identity(model.path, model.facts)
        if model.adapter is not None:
            identity["adapter"] = file_facts(model.adapter.file)
    except OSError as error:
        raise CheckpointError(f"{model.path} cannot be read: {error.strerror}") from error
    return json.dumps(identity, sort_keys=True)


def _raise_known_damage(resolved: "ResolvedModel") -> None:
    from headrace.app.cli.load_for_answers import raise_damage
    from headrace.models.registry.background_check import BackgroundCheck

    raise_damage(BackgroundCheck(resolved))


def _answer(
    arguments: BatchArguments,
    loaded: "LoadedModel",
    draft: "Network | None",
    lines: "list[BatchLine | BadLine]",
    file: "ResultFile | None",
    tally: "Tally",
    cancel: "CancelFlag",
) -> None:
    """Answer the lines until the end, or until `cancel` is set.

    draft: a draft model; None without.
    lines: those without a result so far.
    file: of the results; None: standard output.
    tally: counts the results.
    """
    from headrace.app.answer.answerer import Answerer
    from headrace.app.batch.output import ResultStream
    from headrace.app.batch.progress import ProgressLine
    from headrace.app.batch.run_batch import Batch

    answerer = Answerer(loaded, draft=draft, max_running=arguments.parallel)
    progress = ProgressLine(quiet=arguments.quiet)
    answerer.engine.first_pass.report = progress.first_pass
    output: ResultFile | ResultStream
    if file is not None:
        output = file
    else:
        numbers = None
        if arguments.in_order:
            numbers = [line.number for line in lines]
        output = ResultStream(sys.stdout, numbers, progress.before(sys.stdout))
    try:
        run = Batch(answerer, lines, output, tally, arguments.parallel).run
        run(cancel, lambda batch, tokens: progress.update(tokens, batch.counts))
    finally:
        progress.clear()
        if file is None:
            output.close()


def _report(
    arguments: BatchArguments, settings: "Settings", resolved: "ResolvedModel", tally: "Tally"
) -> "BatchReport":
    from headrace.app.batch.summary import BatchReport
    from headrace.app.versions import versions
    from headrace.models.loading.recommended import recommended_sampling
    from headrace.runtime import ops

    recommended = recommended_options(recommended_sampling(resolved))
    return BatchReport(
        model=resolved.name,
        parallel=arguments.parallel,
        sampling=arguments.options.over(settings.sampling).resolved(recommended).sampling_params(),
        sampling_source=sampling_source({"options": arguments.options, "settings": settings.sampling}, recommended),
        tally=tally,
        kernels=ops.describe(),
        versions=versions(),
    )


def _summarise(report: "BatchReport", *, as_json: bool) -> None:
    from headrace.app.batch.summary import document, sentences, waits_table
    from headrace.app.output.tables import print_table

    if as_json:
        print_json(document(report))
        return
    for line in sentences(report):
        say(line, err=True)
    columns = waits_table(report)
    if columns:
        print_table(columns, rule=False, stderr=True)
