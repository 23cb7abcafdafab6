"""The loop of a batch: submit lines as there is room, step, and write results as they finish.

As many requests are submitted as the engine runs at a time, so the waiting ones are not tokenized and memory does not
grow with the input. An error costs its own line alone.

Guard: tests/app/batch/test_run_batch.py.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import DEFAULTS
from headrace.app.batch.output import Output
from headrace.app.batch.parse import BadLine, BatchLine
from headrace.app.batch.progress import Counts
from headrace.app.batch.result import failure, result
from headrace.models.text.encoding import EncodingStoppedError, encoding_ends
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.engine.request import CancelFlag, SequenceFailed
from headrace.runtime.errors import HeadraceError

SHOWN_ERRORS = 5  # failed lines that are named at the end; the output has all


class Tally(Struct):
    """Totals of a batch so far, as `summary.py` shows them.

    total: lines of the input.
    kept: lines answered by an earlier run.
    answered, failed: lines of this run.
    wall_s: seconds of this run.
    ttft_s, e2e_s: seconds to the first text and to the end, of each answer.
    latencies: inter-token latencies of all answers, in seconds.
    errors: line number and error of the first SHOWN_ERRORS failed lines.
    """

    total: int
    kept: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    wall_s: float = 0.0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    errors: list[tuple[int, HeadraceError]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.kept + self.answered + self.failed

    @property
    def remaining(self) -> int:
        """Lines without a result, where the run was interrupted."""
        return self.total - self.done

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of all answers together."""
        if self.completion_tokens and self.wall_s > 0:
            return self.completion_tokens / self.wall_s
        return None

    @property
    def answers_per_second(self) -> float | None:
        if self.answered and self.wall_s > 0:
            return self.answered / self.wall_s
        return None

    def add(self, answer: Answer) -> None:
        """Count a finished answer."""
        summary = answer.end.summary
        self.answered += 1
        self.prompt_tokens += summary.prompt_tokens
        self.cached_tokens += summary.reused_tokens
        self.completion_tokens += summary.completion_tokens
        self.proposed_tokens += summary.proposed
        self.accepted_tokens += summary.accepted
        self.latencies.extend(answer.latencies)
        self.e2e_s.append(answer.e2e_s)
        if answer.ttft_s is not None:
            self.ttft_s.append(answer.ttft_s)


class Batch:
    """A run over lines that have no answer yet."""

    def __init__(
        self, answerer: Answerer, lines: Iterable[BatchLine | BadLine], output: Output, tally: Tally, max_running: int
    ) -> None:
        """max_running: requests submitted at a time."""
        self.tally = tally
        self._answerer = answerer
        self._waiting = deque(lines)
        self._output = output
        self._max_running = max_running
        self._running: dict[Answer, BatchLine] = {}

    def counts(self) -> Counts:
        """Return the state of the batch, for a progress line."""
        tally = self.tally
        return Counts(
            total=tally.total,
            done=tally.done,
            answered=tally.answered,
            failed=tally.failed,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_share=self._answerer.engine.load().kv_share,
        )

    def run(self, cancel: CancelFlag, watch: Callable[["Batch", int], None]) -> None:
        """Answer all lines, or as many as finish before `cancel` is set.

        `watch` is called after every step with its token count. Raises the errors of `step` and `write`.
        """
        started = time.perf_counter()
        while (self._waiting or self._running) and not cancel:
            with encoding_ends(cancel.__bool__):
                self._fill()
            tokens = self._step() if self._running else 0
            self.tally.wall_s = time.perf_counter() - started
            watch(self, tokens)
        self._running.clear()
        self._answerer.cancel_all()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            line = self._waiting.popleft()
            if isinstance(line, BadLine):
                self._fail(line, line.error)
                continue
            try:
                call = line.call
                chat = self._answerer.chat_prompt
                # The defaults of all lines are in the line's options already; these are headrace's, for the rest.
                options = line.options.over(DEFAULTS)
                thinking = call.thinking(options.thinking, thinks=chat.thinks, has_levels=chat.has_levels)
                options = replace(options, thinking=thinking)
                prompt = self._answerer.encode(
                    line.prompt, thinking=thinking, tools=call.tools, variables=options.chat_template_kwargs
                )
                # The rule for a server in app/engine/host.py, for answers that no earlier text begins.
                prompt = replace(prompt, has_kinds=prompt.chat and chat.thinks)
                answer = self._answerer.prepare(prompt, options, logprobs=call.logprobs)
                self._answerer.submit(answer)
                self._running[answer] = line
            except EncodingStoppedError:  # answered when the batch is resumed
                return
            except HeadraceError as error:
                self._fail(line, error)

    def _step(self) -> int:
        tokens = 0
        for answer, event in self._answerer.step():
            if isinstance(event, TextChunk):
                tokens += len(event.step.tokens)
            elif isinstance(event, Completed):
                line = self._running.pop(answer)
                self._output.write(line, result(line, answer, self._answerer.model))
                self.tally.add(answer)
            elif isinstance(event, SequenceFailed):
                self._fail(self._running.pop(answer), event.error)
        return tokens

    def _fail(self, line: BatchLine | BadLine, error: HeadraceError) -> None:
        self._output.write(line, failure(line, error))
        self.tally.failed += 1
        if len(self.tally.errors) < SHOWN_ERRORS:
            self.tally.errors.append((line.number, error))
