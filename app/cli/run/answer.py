"""The work of `headrace run`: read the prompt, load the model, answer, report.

`run_answer` checks everything that can be refused before it fetches or loads a model. Several answers to one prompt are
in `samples.py`, the stored conversation in `session.py`, the figures in `answer_report.py`.

Guards: tests/app/cli/test_run.py and test_run_settings.py.
"""

import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.app.answer import MAX_RUNNING
from headrace.app.answer.answer import Answer, EncodedPrompt
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.first_pass import FirstPassLine
from headrace.app.answer.options import DEFAULTS
from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.prompt import ChatMessages, prompt_messages
from headrace.app.cli.interrupts import first_interrupt_cancels
from headrace.app.cli.load_for_answers import load_draft, load_with_notes, raise_damage, resolved_model
from headrace.app.cli.run.arguments import RunArguments
from headrace.app.cli.run.prompt import read_prompt
from headrace.app.cli.run.session import RunSession
from headrace.app.cli.say import say
from headrace.app.config.settings import load_settings
from headrace.app.output.plain_output import PlainOutput
from headrace.app.output.progress import RedrawnLine
from headrace.app.output.sanitise import sanitise
from headrace.models.loading.decoder_choice import context_length
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import ResolvedModel
from headrace.models.text.events import Part
from headrace.runtime.engine.request import PrefillProgress
from headrace.runtime.errors import INTERRUPTED, ContextLimitError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.sensors import sensors
from headrace.runtime.network import Network

if TYPE_CHECKING:
    from headrace.app.engine.kv_disk_cache import KVDiskCache

_WRITE_S = 1.0  # for the K/V of a stored conversation; the rest is computed again
_PATIENCE_S = 1.0  # of prefill before its progress is shown


def run_answer(arguments: RunArguments) -> int:
    """Answer the prompt, once or --samples times. Return the exit code."""
    content, attachments = read_prompt(arguments.prompt, arguments.files, raw=arguments.raw)
    names = [attachment.name for attachment in attachments]
    if not {*names} <= {Path(file).name for file in arguments.files} and not arguments.quiet:
        say(f"attached: {', '.join(names)}", err=True)  # files of a folder, a pattern or the prompt
    settings = load_settings()
    arguments.options.grammar_source()  # refused before a model is loaded
    draft = arguments.load.chosen_draft(settings, arguments.options.speculate)
    session = RunSession(settings, arguments, content, attachments)

    started = time.perf_counter()
    resolved = resolved_model(session.model, quiet=arguments.quiet, chat=not arguments.raw)
    spec = arguments.load.spec(settings, draft)
    loaded = load_with_notes(resolved, spec, quiet=arguments.quiet)
    network = load_draft(draft, loaded, quiet=arguments.quiet)
    keeps_kv = session.keeps or session.resumed
    max_running = arguments.samples or MAX_RUNNING
    answerer, disk_cache = _answerer(resolved, loaded, network, max_running, keeps_kv=keeps_kv)
    check = BackgroundCheck(resolved)

    with closing(session):
        load_s = time.perf_counter() - started
        text: str | ChatMessages = content
        if not arguments.raw:
            text = prompt_messages(session.record, session.branch, content, attachments)
        variables = session.options.chat_template_kwargs
        prompt = answerer.encode(text, thinking=session.options.thinking, variables=variables)
        if arguments.show_prompt:
            say(sanitise(answerer.model.tokenizer.decode(prompt.ids, skip_special=False)))
            code = 0
        elif arguments.samples is not None:
            from headrace.app.cli.run.samples import run_samples

            code = run_samples(answerer, prompt, session, arguments)
        else:
            code = _one_answer(answerer, disk_cache, session, prompt, arguments, load_s)
    if code == 0 or arguments.samples is not None:
        raise_damage(check)
    return code


def _answerer(
    resolved: ResolvedModel, loaded: LoadedModel, draft: Network | None, max_running: int, *, keeps_kv: bool
) -> "tuple[Answerer, KVDiskCache | None]":
    """Return the model's answerer, and the disk cache of conversations' K/V if `keeps_kv`."""
    if not keeps_kv:
        return Answerer(loaded, draft=draft, max_running=max_running), None
    from headrace.app.engine.kv_disk_cache import KVDiskCache, disk_cache_bytes, kv_key  # late: imports numpy

    key = kv_key(resolved.path, loaded.network, resolved.adapter)
    answerer = Answerer(loaded, draft=draft, keep_prefix=True, max_running=max_running, kv_key=key)
    return answerer, KVDiskCache(answerer.engine, disk_cache_bytes())


def _one_answer(
    answerer: Answerer,
    disk_cache: "KVDiskCache | None",
    session: RunSession,
    prompt: EncodedPrompt,
    arguments: RunArguments,
    load_s: float,
) -> int:
    """Answer once, and return the exit code. load_s: seconds that loading the model took."""
    answer = answerer.prepare(prompt, session.options.over(DEFAULTS), logprobs=arguments.logprobs)
    progress = RedrawnLine(quiet=arguments.quiet)
    answerer.engine.first_pass.report = FirstPassLine(progress, quiet=arguments.quiet)
    if arguments.as_json or arguments.stats:
        answer.sensors = sensors(machine().backend)
    if disk_cache is not None:
        disk_cache.load(prompt.ids)
        if session.keeps:
            answerer.engine.ending.on_release = lambda sequence: disk_cache.add(sequence.tokens)
    with first_interrupt_cancels(answer.request.cancel):
        try:
            with closing(session.stored(answerer.stream(answer), answer, answerer.model)) as parts:
                print_answer(answer, parts, progress, echo=not arguments.as_json, quiet=arguments.quiet)
        except ContextLimitError as error:
            error.hint = _context_hint(answerer, session)
            raise
    if arguments.reported or (sys.stderr.isatty() and not arguments.quiet):
        # Imported only if it is printed.
        from headrace.app.cli.run.answer_report import make_report, print_report

        print_report(make_report(answerer, answer, session, load_s), arguments)
    if disk_cache is not None:
        end = time.monotonic() + _WRITE_S
        disk_cache.write(lambda: time.monotonic() > end)
    if answer.request.cancel and answer.end.reason == "cancelled":
        return INTERRUPTED
    answer.check_whole()
    return 0


def _context_hint(answerer: Answerer, session: RunSession) -> str:
    longest = context_length(answerer.model.checkpoint)
    shorten = "shorten the prompt"
    if session.resumed:
        shorten = "begin a new conversation"
    if answerer.model.context_limit < longest:
        return f"{shorten}, or raise the limit with --context, at most {longest}"
    return shorten


def print_answer(answer: Answer, parts: Iterable[Part], progress: RedrawnLine, *, echo: bool, quiet: bool) -> None:
    """Consume an answer to its end.

    parts: of the answer, as they are generated.
    progress: shows the prefill's until there is text.
    echo: print its text. Of an answer with a schema or a grammar, thinking is left out: standard output has the text
        that fits.
    quiet: no remarks.
    """
    output = PlainOutput()
    tells_repetition = sys.stderr.isatty() and not quiet  # once
    for part in parts:
        if isinstance(part, PrefillProgress):
            if time.monotonic() - answer.prompt.started > _PATIENCE_S:
                progress.draw(f"prefill {part.done} of {part.total} tokens")
            continue
        progress.clear()
        text = part.content if answer.constrained else part.text
        if echo:
            output.write(text)
        if tells_repetition and answer.repeats:
            tells_repetition = False
            if sys.stdout.isatty():  # the remark gets a line of its own there; a file keeps the answer as it is
                output.end()
            say(f"headrace: {REPEATS}; Ctrl-C ends it", err=True)
    output.end()
