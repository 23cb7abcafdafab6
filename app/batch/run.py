"""The loop of a batch: lines in as there is room, one step of all that run, results out as they finish.

The engine decides what happens in a step; here are kept as many requests with it as it runs at a time, so that what
waits has not been tokenized, and memory does not grow with the input. A request that fails costs its own line.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.app.batch.answering import Answering, Asking
from headrace.app.batch.line import BadLine, Line
from headrace.app.batch.output import Output
from headrace.app.batch.result import Answer, failure, result
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import HeadraceError, expected

SHOWN_ERRORS = 5


@dataclass
class Tally:
    """What has happened so far. Times in seconds; `answered` and `failed` count lines of this run.

    latencies: every inter-token latency of every answer. errors: of the first few lines that failed.
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
    def tokens_per_second(self) -> float | None:
        """Of all answers together."""
        return self.completion_tokens / self.wall_s if self.completion_tokens and self.wall_s > 0 else None

    @property
    def answers_per_second(self) -> float | None:
        return self.answered / self.wall_s if self.answered and self.wall_s > 0 else None

    @property
    def left(self) -> int:
        """Lines without a result: only where the run was ended before its end."""
        return self.total - self.done


class Batch:
    """A run over lines that have no answer yet."""

    def __init__(
        self, engine: Engine, asking: Asking, lines: Iterable[Line | BadLine], output: Output, tally: Tally, most: int
    ) -> None:
        """most: requests that the engine has at a time."""
        self.tally = tally
        self._engine = engine
        self._asking = asking
        self._waiting = deque(lines)
        self._output = output
        self._most = most
        self._running: dict[Sequence, Answering] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def kv_share(self) -> float | None:
        """How much of the room for K/V is used, a fraction; None where there is no limit."""
        load = self._engine.load()
        return load.kv_used_bytes / load.kv_room_bytes if load.kv_room_bytes else None

    def run(self, cancel: CancelFlag, watch: Callable[["Batch", int], None]) -> None:
        """To the end, or until `cancel`: what was not finished then has no result.

        `watch` is called after every step with the tokens it gave. Raises what `Engine.step` and `Output.write` raise.
        """
        started = time.perf_counter()
        while (self._waiting or self._running) and not cancel:
            self._fill()
            tokens = self._step() if self._running else 0
            self.tally.wall_s = time.perf_counter() - started
            watch(self, tokens)
        self._leave()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._most:
            line, started = self._waiting.popleft(), time.perf_counter()
            try:
                if isinstance(line, BadLine):
                    raise line.error
                request = self._asking.request(line)
                answering = Answering(line, request, self._asking.model, started)
                self._running[self._engine.submit(request)] = answering
            except HeadraceError as error:
                self._fail(line, error)

    def _step(self) -> int:
        tokens = 0
        for sequence, event in self._engine.step():
            answering = self._running.get(sequence)
            if answering is None:  # it failed here
                continue
            before = answering.tokens
            try:
                answer = answering.take(event)
            except Exception as error:
                del self._running[sequence]
                self._engine.cancel(sequence)
                self._fail(answering.line, expected(error))
                continue
            tokens += answering.tokens - before
            if answer is not None:
                del self._running[sequence]
                self._answered(answering, answer)
        return tokens

    def _answered(self, answering: Answering, answer: Answer) -> None:
        tally, line, summary = self.tally, answering.line, answer.finished.summary
        self._output.write(line, result(line, answer, self._asking.model.name))
        tally.answered += 1
        tally.prompt_tokens += summary.prompt_tokens
        tally.cached_tokens += summary.reused_tokens
        tally.completion_tokens += summary.completion_tokens
        tally.proposed_tokens += summary.proposed
        tally.accepted_tokens += summary.accepted
        tally.latencies.extend(answering.latencies)
        tally.e2e_s.append(answer.e2e_s)
        if answer.ttft_s is not None:
            tally.ttft_s.append(answer.ttft_s)

    def _fail(self, line: Line | BadLine, error: HeadraceError) -> None:
        self._output.write(line, failure(line, error))
        self.tally.failed += 1
        if len(self.tally.errors) < SHOWN_ERRORS:
            self.tally.errors.append((line.number, error))

    def _leave(self) -> None:
        """Give back what the sequences that will not be finished hold."""
        for sequence in self._running:
            self._engine.cancel(sequence)
        self._running.clear()
        while self._engine.has_work:
            self._engine.step()
