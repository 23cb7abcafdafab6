"""The work of `headrace run`: read the prompt, load the model, answer, report."""

import sys
import time
from contextlib import closing

from headrace.app.answer.answerer import MAX_RUNNING, Answerer
from headrace.app.answer.options import DEFAULTS
from headrace.app.cli.answer_stream import print_answer
from headrace.app.cli.draft import chosen_draft, load_draft
from headrace.app.cli.interrupts import first_interrupt_cancels
from headrace.app.cli.load_for_answers import load_noted, raise_damage, resolved_model
from headrace.app.cli.run_arguments import DEFAULT_GROUP_SIZE, RunArguments
from headrace.app.cli.run_prompt import read_prompt
from headrace.app.cli.run_session import RunSession
from headrace.app.config.settings import load_settings
from headrace.app.sessions.records import Attachment
from headrace.models.checkpoint.quantization import Quantization
from headrace.models.loading.decoder_choice import context_length
from headrace.models.registry.background_check import BackgroundCheck
from headrace.runtime.errors import ContextLimitError


def run_answer(arguments: RunArguments) -> int:
    """Answer the prompt, once or --samples times. Return the exit code."""
    content, attachments = read_prompt(arguments.prompt, arguments.files, raw=arguments.raw)
    settings = load_settings()
    draft = chosen_draft(arguments.draft, settings.chat.draft, arguments.options.speculate)
    session = RunSession(settings, arguments)
    started = time.perf_counter()
    requantize = None  # refused before anything is fetched
    if arguments.quantize is not None:
        requantize = Quantization(arguments.quantize, arguments.group_size or DEFAULT_GROUP_SIZE)
    resolved = resolved_model(session.model, quiet=arguments.quiet)
    loaded = load_noted(
        resolved,
        context=arguments.context or settings.chat.context or None,
        requantize=requantize,
        kv=arguments.kv or settings.chat.kv,
        force=arguments.force,
    )
    network = load_draft(draft, loaded, quiet=arguments.quiet)
    answerer = Answerer(loaded, draft=network, max_running=arguments.samples or MAX_RUNNING)
    check = BackgroundCheck(resolved)
    with closing(session):
        if arguments.samples is not None:
            from headrace.app.cli.run_samples import run_samples

            messages = content if arguments.raw else session.messages(content, attachments)
            code = run_samples(answerer, messages, session.options.over(DEFAULTS), arguments)
        else:
            code = _one_answer(answerer, session, content, attachments, arguments, started)
    if code == 0 or arguments.samples is not None:
        raise_damage(check)
    return code


def _one_answer(
    answerer: Answerer,
    session: RunSession,
    content: str,
    attachments: tuple[Attachment, ...],
    arguments: RunArguments,
    started: float,
) -> int:
    """Answer once. started: `time.perf_counter()` before the model was loaded."""
    messages = content if arguments.raw else session.messages(content, attachments)
    loaded_at = time.perf_counter()
    prompt = answerer.encode(messages, thinking=session.options.thinking)
    answer = answerer.prepare(prompt, session.options.over(DEFAULTS), logprobs=arguments.logprobs)
    with first_interrupt_cancels(answer.request.cancel):
        try:
            parts = session.stored(answerer.stream(answer), answer, content, attachments, answerer.model)
            with closing(parts):
                print_answer(answer, parts, echo=not arguments.as_json, quiet=arguments.quiet)
        except ContextLimitError as error:
            error.hint = _context_hint(answerer, session)
            raise
    if arguments.as_json or arguments.stats or (sys.stderr.isatty() and not arguments.quiet):
        from headrace.app.cli.run_report import make_report, print_report  # imported only if it is printed

        print_report(make_report(answerer, answer, session.id, loaded_at - started), arguments)
    return 130 if answer.request.cancel and answer.end.reason == "cancelled" else 0


def _context_hint(answerer: Answerer, session: RunSession) -> str | None:
    longest = context_length(answerer.model.checkpoint)
    shorten = "begin a new conversation" if session.resumed else "shorten the prompt"
    if answerer.model.context_limit < longest:
        return f"{shorten}, or raise the limit with --context, at most {longest}"
    return shorten if session.resumed else None
