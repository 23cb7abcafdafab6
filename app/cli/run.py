"""`headrace run`: one prompt, one answer, streamed to standard output; everything else goes to standard error.

The order of work is the order of the file: read the prompt, get the model, generate, account for it. Standard
output carries nothing but the (sanitised) answer, or with --json one document.
"""

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from headrace.app.answer.sampling_options import DEFAULT_MAX_TOKENS, sampling_options, sampling_settings
from headrace.app.cli.completion import model_names
from headrace.app.cli.draft import chosen_draft, draft_option, load_draft
from headrace.app.cli.say import say
from headrace.app.config.kv_option import kv_option
from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import may_style
from headrace.runtime.errors import ContextLimitError, UsageError

if TYPE_CHECKING:
    from headrace.app.cli.answer_stream import AnswerStream
    from headrace.app.cli.run_report import RunReport
    from headrace.app.cli.run_session import RunSession
    from headrace.models.loading.load import LoadedModel
    from headrace.runtime.engine.request import Request

DEFAULT_GROUP_SIZE = 64
_LAST = "last"


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    shell_complete=model_names,
    help="Catalog name, local directory, .gguf file or hub id.",
)
@click.option("-s", "--system", metavar="TEXT", help="System message.")
@click.option("-f", "--file", "files", multiple=True, metavar="FILE", help="Send a text file along. Repeatable.")
@click.option("-c", "--continue", "go_on", is_flag=True, help="Go on with the last conversation: --resume last.")
@click.option("--resume", metavar="ID", help="Go on with a conversation: its id, the beginning of it, or `last`.")
@click.option("--save/--no-save", default=None, help="Keep this conversation, or do not. Default: the settings'.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), help=f"At most this many tokens [{DEFAULT_MAX_TOKENS}].")
@sampling_options
@draft_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable.")
@click.option("--thinking/--no-thinking", default=None, help="Whether a reasoning model that can be told thinks first.")
@click.option("--samples", type=click.IntRange(1, 256), metavar="N", help="N answers, decoding side by side.")
@click.option("--context", type=click.IntRange(1), help="Context limit in tokens. Default: what the model allows.")
@kv_option
@click.option("--quantize", type=int, metavar="BITS", help="Quantize a plain checkpoint while loading: 2 3 4 5 6 8.")
@click.option("--group-size", type=int, help="Group size for --quantize: 32, 64 (the default) or 128.")
@click.option("--force", is_flag=True, help="Go beyond what memory, or with --context the model, allows.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the text.")
@click.option("--steps", "with_steps", is_flag=True, help="With --json: one record per decode step.")
@click.option("--logprobs", type=click.IntRange(0, 100), metavar="N", help="With --json: the N best per token.")
@click.option("--stats", is_flag=True, help="Print the full account to standard error.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing but the answer and errors: no progress, no closing line.")
def run(
    prompt: str | None,
    model: str | None,
    system: str | None,
    files: tuple[str, ...],
    go_on: bool,
    resume: str | None,
    save: bool | None,
    samples: int | None,
    draft: str | None,
    context: int | None,
    kv: str | None,
    quantize: int | None,
    group_size: int | None,
    force: bool,
    raw: bool,
    as_json: bool,
    with_steps: bool,
    logprobs: int | None,
    stats: bool,
    quiet: bool,
    **sampling: Any,
) -> int:
    """Answer PROMPT. Text piped in goes before it, a blank line between; `-` is that text alone.

    @FILE in PROMPT, as -f FILE, sends a text file along. What no option says comes from the environment
    (HEADRACE_MODEL), then from the settings file (model, system prompt, context, sampling, whether to --save; `headrace
    paths` finds it), then from the model.
    """
    if (with_steps or logprobs is not None) and not as_json:
        raise UsageError("--steps and --logprobs go with --json")
    if group_size is not None and quantize is None:
        raise UsageError("--group-size goes with --quantize")
    if quiet and stats:
        raise UsageError("--quiet and --stats exclude each other")
    if go_on and resume is not None:
        raise UsageError("-c is --resume last: give one of them")
    resume = _LAST if go_on else resume
    if samples is not None and (resume is not None or save or with_steps or logprobs is not None or stats):
        raise UsageError("--samples neither keeps a conversation, nor has --stats, --steps or --logprobs")
    if raw:
        _check_raw(system, sampling["thinking"], files, resume, save)
    # Kept out of the module's head: `headrace run --help` needs none of it.
    from headrace.app.answer.speculation import speculation
    from headrace.app.cli.answer_stream import AnswerStream
    from headrace.app.cli.interrupts import first_interrupt_cancels
    from headrace.app.cli.load_for_answers import load_noted, raise_damage, resolved_model
    from headrace.app.cli.run_prompt import read_prompt
    from headrace.app.cli.run_session import RunSession
    from headrace.app.config.settings import load_settings
    from headrace.models.checkpoint.quantization import Quantization
    from headrace.models.loading.decoder_choice import context_length
    from headrace.models.registry.background_check import BackgroundCheck
    from headrace.models.text.answer import answer
    from headrace.models.text.chat_prompt import ChatPrompt
    from headrace.runtime.engine.engine import Engine
    from headrace.runtime.engine.request import Request
    from headrace.runtime.sampling.params import SamplingParams
    from headrace.runtime.speculation.pass_costs import PassCostStore

    content, attachments = read_prompt(prompt, files, raw=raw)
    settings = load_settings()
    draft = chosen_draft(draft, settings.chat.draft, sampling)
    sampling["stop"] = list(sampling["stop"]) or None
    keep = False if raw or samples is not None else save
    session = RunSession(settings, resume=resume, keep=keep, model=model, system=system, given=sampling)
    options = {**session.sampling, "logit_bias": sampling["logit_bias"]}
    most, thinking, stop = options.pop("max_tokens", None), options.pop("thinking", None), options.pop("stop", ())
    speculate = options.pop("speculate", None)
    _check_options(options, stop)
    started = time.perf_counter()
    requantize = None  # malformed is said before anything is fetched
    if quantize is not None:
        requantize = Quantization(quantize, DEFAULT_GROUP_SIZE if group_size is None else group_size)
    resolved = resolved_model(session.model, quiet=quiet)
    loaded = load_noted(
        resolved,
        context=context or settings.chat.context or None,
        requantize=requantize,
        kv=kv or settings.chat.kv,
        force=force,
    )
    guessing = load_draft(draft, loaded, quiet=quiet)
    check = BackgroundCheck(resolved)
    if samples is not None:
        from headrace.app.cli.run_samples import run_samples

        asked = content if raw else session.messages(content, attachments)
        rest = {
            "max_tokens": most or DEFAULT_MAX_TOKENS,
            "stop": tuple(stop),
            "thinking": thinking,
            "speculate": speculate,
        }
        code = run_samples(loaded, samples, asked, rest, options, draft=guessing, as_json=as_json, quiet=quiet)
        raise_damage(check)
        return code
    chosen = sampling_settings(options, loaded.generation_defaults)
    params = SamplingParams(**chosen).with_seed()
    submitted = time.perf_counter()
    if raw:
        ids, opening = loaded.tokenizer.encode_prompt(content), ""
    else:
        prompts = ChatPrompt(loaded.tokenizer)
        ids = prompts.encode(session.messages(content, attachments), thinking=thinking)
        opening = prompts.opening(ids)
    request = Request(
        prompt=ids,
        max_tokens=most or DEFAULT_MAX_TOKENS,
        sampling=params,
        stop_ids=loaded.tokenizer.eos_ids,
        logprobs=logprobs,
        speculate=speculation(speculate, draft=guessing is not None),
    )
    tokenized = time.perf_counter()
    costs = PassCostStore(loaded.network.cost)
    engine = Engine(loaded.network, context_limit=loaded.context_limit, draft=guessing, pass_costs=costs)
    with closing(session), first_interrupt_cancels(request.cancel):
        stream = AnswerStream(submitted, echo=not as_json, quiet=quiet)
        try:
            parts = answer(engine, loaded.tokenizer, request, stop)
            used = {**session.sampling, **{name: value for name, value in chosen.items() if name != "logit_bias"}}
            parts = session.kept(parts, content, attachments, model=loaded.name, sampling=used, opening=opening)
            with closing(parts) as kept:
                stream.follow(kept)
        except ContextLimitError as error:
            error.hint = _context_hint(session, loaded.context_limit, context_length(loaded.checkpoint))
            raise
    timing = {"load_s": submitted - started, "tokenize_s": tokenized - submitted}
    if as_json or stats or (sys.stderr.isatty() and not quiet):
        report = _run_report(loaded, request, stream, session.id, timing)
        _report(report, as_json=as_json, with_steps=with_steps, stats=stats, quiet=quiet)
    if request.cancel and stream.finished.reason == "cancelled":
        return 130
    raise_damage(check)
    return 0


def _check_raw(
    system: str | None, thinking: bool | None, files: tuple[str, ...], resume: str | None, save: bool | None
) -> None:
    if system or thinking is not None:
        raise UsageError("--raw has no place for a system message, nor for --thinking")
    if files or resume is not None or save:
        raise UsageError("--raw sends no files, and neither keeps a conversation nor goes on with one")


def _check_options(sampling: dict[str, Any], stops: tuple[str, ...]) -> None:
    """Raises UsageError now for what only the loaded model will be asked to do: a typo is not worth a download."""
    from headrace.models.text.stop_strings import StopMatcher
    from headrace.runtime.sampling.params import SamplingParams

    SamplingParams(**sampling_settings(sampling, {}))
    StopMatcher(stops)


def _context_hint(session: "RunSession", limit: int, longest: int) -> str | None:
    shorten = "begin a new conversation" if session.resumed else "shorten the prompt"
    if limit < longest:
        return f"{shorten}, or raise the limit with --context, at most {longest}"
    return shorten if session.resumed else None


def _run_report(
    loaded: "LoadedModel", request: "Request", stream: "AnswerStream", session: str | None, timing: dict[str, float]
) -> "RunReport":
    from headrace.app.cli.run_report import RunReport
    from headrace.app.versions import versions
    from headrace.runtime import ops
    from headrace.runtime.machine.bandwidth import read_now
    from headrace.runtime.machine.hardware import machine
    from headrace.runtime.machine.peaks import cached_peak, correct

    beside = read_now("run")
    summary = stream.finished.summary
    correct(summary.achieved_gb_s, step_bytes=summary.mean_step_bytes, steps=summary.steps)
    return RunReport(
        model=loaded.name,
        kind=loaded.kind,
        cost=loaded.network.cost,
        request=request,
        text=stream.text,
        steps=stream.steps,
        finished=stream.finished,
        ttft_s=stream.ttft_s,
        session=session,
        machine=machine(),
        peak=cached_peak() or beside,
        beside=beside,
        kernels=ops.describe(),
        versions=versions(),
        context_limit=loaded.context_limit,
        kv=loaded.kv,
        **timing,
    )


def _report(report: "RunReport", *, as_json: bool, with_steps: bool, stats: bool, quiet: bool) -> None:
    from headrace.app.cli.json_output import print_json
    from headrace.app.cli.run_report import document, summary_line, table

    if as_json:
        print_json(document(report, with_steps=with_steps))
    if stats:
        rows = table(report)
        width = max(len(label) for label, _ in rows)
        say("\n".join(f"{label:<{width}}  {value}" for label, value in rows), err=True)
    elif sys.stderr.isatty() and not quiet:
        line = sanitise(summary_line(report))
        click.echo(click.style(line, dim=True) if may_style(sys.stderr) else line, err=True)
