"""`headrace run`: one prompt, one answer, streamed to standard output; everything else goes to standard error.

The order of work is the order of the file: read the prompt, get the model, generate, account for it. Standard
output carries nothing but the (sanitised) answer, or with --json one document.
"""

import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from headrace.app.cli.completion import model_names
from headrace.app.sampling_options import sampling_options, sampling_settings
from headrace.app.settings import chosen_model, load_settings
from headrace.app.terminal import can_redraw, may_style
from headrace.runtime.errors import ContextLimitError, UsageError

if TYPE_CHECKING:
    from headrace.app.cli.run_report import RunReport
    from headrace.models.load import LoadedModel
    from headrace.models.text.answer import Part
    from headrace.runtime.request import Finished, Request, Step

DEFAULT_MAX_TOKENS = 2048
DEFAULT_GROUP_SIZE = 64
_PATIENCE_S = 1.0  # how long prefill may take before its progress is shown
_PROGRESS_WIDTH = 60


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
@click.option("-n", "--max-tokens", type=click.IntRange(1), help=f"At most this many tokens [{DEFAULT_MAX_TOKENS}].")
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable.")
@click.option("--thinking/--no-thinking", default=None, help="Whether a reasoning model that can be told thinks first.")
@click.option("--context", type=click.IntRange(1), help="Context limit in tokens. Default: what the model allows.")
@click.option("--quantize", type=int, metavar="BITS", help="Quantize a plain checkpoint while loading: 2 3 4 5 6 8.")
@click.option("--group-size", type=int, help="Group size for --quantize: 32, 64 (the default) or 128.")
@click.option("--force", is_flag=True, help="Go beyond what memory, or with --context the model, allows.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the text.")
@click.option("--steps", "with_steps", is_flag=True, help="With --json: one record per decode step.")
@click.option("--logprobs", type=click.IntRange(0, 100), metavar="N", help="With --json: the N best per token.")
@click.option("--stats", is_flag=True, help="Print the full account to standard error.")
def run(
    prompt: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    thinking: bool | None,
    context: int | None,
    quantize: int | None,
    group_size: int | None,
    force: bool,
    raw: bool,
    as_json: bool,
    with_steps: bool,
    logprobs: int | None,
    stats: bool,
    **sampling: Any,
) -> int:
    """Answer PROMPT. Text piped in goes before it, a blank line between."""
    if (with_steps or logprobs is not None) and not as_json:
        raise UsageError("--steps and --logprobs go with --json")
    if group_size is not None and quantize is None:
        raise UsageError("--group-size goes with --quantize")
    if raw and (system or thinking is not None):
        raise UsageError("--raw has no place for a system message, nor for --thinking")
    text = _read_prompt(prompt)
    # Kept out of the module's head: `headrace run --help` needs none of it.
    from headrace.app.cli.interrupts import first_interrupt_cancels
    from headrace.models.load import context_length
    from headrace.models.text.answer import answer
    from headrace.runtime.engine import Engine
    from headrace.runtime.request import Request
    from headrace.runtime.sampling import SamplingParams

    _check_options(sampling, stop)
    started = time.perf_counter()
    model = chosen_model(model, load_settings())
    loaded = _load(model, context, quantize, DEFAULT_GROUP_SIZE if group_size is None else group_size, force)
    settings = SamplingParams(**sampling_settings(sampling, loaded.generation_defaults)).with_seed()
    submitted = time.perf_counter()
    request = Request(
        prompt=_encode(loaded, text, system, raw, thinking),
        max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
        sampling=settings,
        stop_ids=loaded.tokenizer.eos_ids,
        logprobs=logprobs,
    )
    tokenized = time.perf_counter()
    engine = Engine(loaded.network, context_limit=loaded.context_limit)
    with first_interrupt_cancels(request.cancel):
        shown = _Shown(submitted, echo=not as_json)
        try:
            shown.follow(answer(engine, loaded.tokenizer, request, stop))
        except ContextLimitError as error:
            longest = context_length(loaded.checkpoint)
            if loaded.context_limit < longest:
                error.hint = f"shorten the prompt, or raise the limit with --context, at most {longest}"
            raise
    timing = {"load_s": submitted - started, "tokenize_s": tokenized - submitted}
    if as_json or stats or sys.stderr.isatty():
        _report(_run_report(loaded, request, shown, timing), as_json=as_json, with_steps=with_steps, stats=stats)
    return 130 if request.cancel and shown.finished.reason == "cancelled" else 0


def _check_options(sampling: dict[str, Any], stops: tuple[str, ...]) -> None:
    """Raises UsageError now for what only the loaded model will be asked to do: a typo is not worth a download."""
    from headrace.models.text.stop_strings import StopMatcher
    from headrace.runtime.sampling import SamplingParams

    SamplingParams(**sampling_settings(sampling, {}))
    StopMatcher(stops)


def _read_prompt(argument: str | None) -> str:
    """Piped text, a blank line, the argument; whichever there is. Raises UsageError if there is neither."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            piped = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text (byte {error.start})") from None
    parts = [part for part in (piped.strip("\n"), argument or "") if part.strip()]
    if not parts:
        raise UsageError("no prompt", 'headrace run "Why is the sky blue?", or pipe text in')
    return "\n\n".join(parts)


def _load(model: str | None, context: int | None, quantize: int | None, group_size: int, force: bool) -> "LoadedModel":
    from headrace.app.progress import drawn_progress
    from headrace.models.checkpoint.quantization import Quantization
    from headrace.models.checkpoint.validation import blamed_on_store
    from headrace.models.load import load_model
    from headrace.models.registry.resolve import resolve

    requantize = Quantization(quantize, group_size) if quantize is not None else None  # before anything is fetched
    with drawn_progress() as progress:
        resolved = resolve(model, progress=progress)
    with blamed_on_store(resolved.stored_as, resolved.path):
        loaded = load_model(resolved.path, name=resolved.name, context=context, requantize=requantize, force=force)
    for note in loaded.notes:
        click.echo(note, err=True)
    return loaded


def _encode(loaded: "LoadedModel", text: str, system: str | None, raw: bool, thinking: bool | None) -> list[int]:
    if raw:
        return loaded.tokenizer.encode_prompt(text)
    from headrace.models.text.chat_prompt import ChatPrompt

    messages = [{"role": "system", "content": system}] if system else []
    return ChatPrompt(loaded.tokenizer).encode([*messages, {"role": "user", "content": text}], thinking=thinking)


class _Shown:
    """The answer as it arrives: printed unless `echo` is off, remembered for the report."""

    def __init__(self, submitted: float, *, echo: bool) -> None:
        from headrace.app.sanitise import Sanitiser

        self._submitted = submitted
        self._echo = echo
        self._sanitiser = Sanitiser()
        self._pieces: list[str] = []
        self._progress_drawn = False
        self.steps: list[Step] = []
        self.ttft_s: float | None = None
        self._finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finished(self) -> "Finished":
        """How it ended; there once `follow` has returned."""
        assert self._finished is not None
        return self._finished

    def follow(self, parts: Iterable["Part"]) -> None:
        """Consume the answer to its end."""
        from headrace.models.text.answer import Completed, TextChunk

        for part in parts:
            if isinstance(part, TextChunk | Completed):
                self._clear_progress()
                self._say(part.text)
                if isinstance(part, TextChunk):
                    self.steps.append(part.step)
                else:
                    self._finished = part.finished
            else:
                self._draw_progress(part.done, part.total)
        if self._echo and self.text and not self.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self._submitted
        self._pieces.append(text)
        if self._echo:
            sys.stdout.write(self._sanitiser.feed(text))
            sys.stdout.flush()

    def _draw_progress(self, done: int, total: int) -> None:
        if can_redraw(sys.stderr) and time.perf_counter() - self._submitted > _PATIENCE_S:
            self._progress_drawn = True
            sys.stderr.write(f"\r{f'prefill {done} of {total} tokens':<{_PROGRESS_WIDTH}}")
            sys.stderr.flush()

    def _clear_progress(self) -> None:
        if self._progress_drawn:
            self._progress_drawn = False
            sys.stderr.write(f"\r{'':<{_PROGRESS_WIDTH}}\r")
            sys.stderr.flush()


def _run_report(loaded: "LoadedModel", request: "Request", shown: _Shown, timing: dict[str, float]) -> "RunReport":
    from headrace.app.cli.run_report import RunReport
    from headrace.app.versions import versions
    from headrace.runtime import ops
    from headrace.runtime.machine.bandwidth import read_now
    from headrace.runtime.machine.hardware import machine
    from headrace.runtime.machine.peaks import cached_peak, correct

    beside = read_now("run")
    summary = shown.finished.summary
    moved = round(summary.achieved_gb_s * 1e9 * summary.tpot_s) if summary.achieved_gb_s and summary.tpot_s else 0
    correct(summary.achieved_gb_s, step_bytes=moved, steps=summary.steps)
    return RunReport(
        model=loaded.name,
        kind=loaded.kind,
        cost=loaded.network.cost,
        request=request,
        text=shown.text,
        steps=shown.steps,
        finished=shown.finished,
        ttft_s=shown.ttft_s,
        machine=machine(),
        peak=cached_peak() or beside,
        beside=beside,
        kernels=ops.describe(),
        versions=versions(),
        context_limit=loaded.context_limit,
        **timing,
    )


def _report(report: "RunReport", *, as_json: bool, with_steps: bool, stats: bool) -> None:
    from headrace.app.cli.run_report import document, summary_line, table

    if as_json:
        click.echo(json.dumps(document(report, with_steps=with_steps)))
    if stats:
        rows = table(report)
        width = max(len(label) for label, _ in rows)
        click.echo("\n".join(f"{label:<{width}}  {value}" for label, value in rows), err=True)
    elif sys.stderr.isatty():
        line = summary_line(report)
        click.echo(click.style(line, dim=True) if may_style(sys.stderr) else line, err=True)
