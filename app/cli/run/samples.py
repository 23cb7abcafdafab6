"""`headrace run --samples N`: several answers to one prompt, decoded side by side.

They differ by their seeds alone, which count up from the first. They are printed in that order, each as soon as it and
those before it are finished.

Guard: tests/app/cli/test_batch.py.
"""

import sys
import time
from collections.abc import Mapping, Sequence

import click
from msgspec.structs import replace

from headrace.app.answer.answer import Answer, EncodedPrompt
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import DEFAULTS, SamplingSource
from headrace.app.answer.phrases import sampling_phrase
from headrace.app.batch.progress import Counts, ProgressLine
from headrace.app.cli.interrupts import first_interrupt_cancels
from headrace.app.cli.run.arguments import RunArguments
from headrace.app.cli.run.session import RunSession
from headrace.app.cli.say import print_json, say
from headrace.app.output.sanitise import sanitise
from headrace.app.versions import versions
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.engine.request import CancelFlag, SequenceFailed
from headrace.runtime.errors import INTERRUPTED, HeadraceError, UsageError
from headrace.runtime.sampling.params import SEEDS


class Samples:
    """The answers, printed in order unless `as_json`.

    answers: in the order of their seeds.
    finished: those with an end.
    wall_s: seconds of answering them.
    """

    def __init__(self, answerer: Answerer, answers: Sequence[Answer], arguments: RunArguments) -> None:
        self.answers = answers
        self.wall_s = 0.0
        self._answerer = answerer
        self._progress = ProgressLine(quiet=arguments.quiet)
        answerer.engine.first_pass.report = self._progress.first_pass
        self._before = self._progress.before(sys.stdout)
        self._echo = not arguments.as_json
        self._printed = 0  # answers that were printed or passed over, from the first
        self._failed: dict[Answer, HeadraceError] = {}

    @property
    def finished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finished is not None]

    def run(self, cancel: CancelFlag) -> None:
        """Generate all answers, or as many as finish before `cancel` is set. Raises the first answer's error."""
        started = time.perf_counter()
        for answer in self.answers:
            self._answerer.submit(answer)
        try:
            while self._answerer.has_work and not cancel:
                tokens = 0
                for answer, event in self._answerer.step():
                    if isinstance(event, TextChunk):
                        tokens += len(event.step.tokens)
                    elif isinstance(event, SequenceFailed):
                        self._failed[answer] = event.error
                    elif isinstance(event, Completed):
                        self._print_finished()
                self.wall_s = time.perf_counter() - started
                self._progress.update(tokens, self._counts)
            self._answerer.cancel_all()
        finally:
            self._progress.clear()
            self._print_finished(all_of_them=True)
        if self._failed:
            raise next(iter(self._failed.values()))

    def _print_finished(self, *, all_of_them: bool = False) -> None:
        """Print finished answers in order, up to the first unfinished one or beyond."""
        while self._printed < len(self.answers):
            answer = self.answers[self._printed]
            if answer.finished is None and not all_of_them:
                return
            self._printed += 1
            if self._echo and answer.finished is not None:
                self._before()
                text = answer.text
                if answer.constrained:
                    text = answer.result
                heading = f"--- {self._printed} of {len(self.answers)}, seed {answer.finished.seed} ---"
                click.echo(f"{heading}\n{sanitise(text)}\n")

    def _counts(self) -> Counts:
        answered = len(self.finished)
        return Counts(
            total=len(self.answers),
            done=answered + len(self._failed),
            answered=answered,
            failed=len(self._failed),
            running=len(self.answers) - answered - len(self._failed),
            waiting=0,
            kv_share=self._answerer.engine.load().kv_share,
        )


def run_samples(answerer: Answerer, prompt: EncodedPrompt, session: RunSession, arguments: RunArguments) -> int:
    """Answer a prompt `arguments.samples` times. Return the exit code.

    Raises UsageError for greedy decoding.
    """
    options = session.options.over(DEFAULTS)
    first = answerer.prepare(prompt, options)
    source = session.sampling_source(answerer.model)
    if first.request.sampling.greedy:
        raise UsageError("greedy decoding gives the same answer every time", "sample with -t, such as -t 0.7")
    seed = first.request.sampling.seed
    count = arguments.samples
    assert seed is not None
    assert count is not None
    seeds = [(seed + number) % SEEDS for number in range(count)]
    answers = [answerer.prepare(prompt, replace(options, seed=each)) for each in seeds]
    samples = Samples(answerer, answers, arguments)
    cancel = CancelFlag()
    with first_interrupt_cancels(cancel):
        samples.run(cancel)
    if arguments.as_json:
        print_json(_document(answerer, samples, source))
    elif sys.stderr.isatty() and not arguments.quiet:
        say(sampling_phrase(first.request.sampling, source), err=True)
    if len(samples.finished) < count:  # Ctrl-C: an answer that failed has raised its error
        return INTERRUPTED
    for answer in answers:
        answer.check_whole()
    return 0


def _document(answerer: Answerer, samples: Samples, source: SamplingSource) -> Mapping[str, object]:
    """Return the document described in docs/run-json.md."""
    finished = samples.finished
    tokens = sum(answer.end.summary.completion_tokens for answer in finished)
    rate = None
    if tokens and samples.wall_s > 0:
        rate = tokens / samples.wall_s
    return {
        "model": answerer.model.name,
        "prompt_tokens": next((answer.end.summary.prompt_tokens for answer in finished), None),
        "completion_tokens": tokens,
        "wall_s": samples.wall_s,
        "tokens_per_second": rate,
        "sampling": samples.answers[0].sampling(),
        "sampling_source": source,
        "samples": [
            {
                "text": answer.text,
                "finish_reason": answer.end.reason,
                "ended_by": answer.end.ended_by,
                "seed": answer.end.seed,
                "timing": answer.timing(),
                "completion_tokens": answer.end.summary.completion_tokens,
            }
            for answer in finished
        ],
        "versions": versions(),
    }
