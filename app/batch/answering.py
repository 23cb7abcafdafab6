"""One request on its way: from the line to token ids, from the engine's events to an answer.

The texts of the line go the way of every other prompt: chat template, control tokens, stop strings, detokenizer.
"""

import time
from dataclasses import dataclass

from headrace.app.answer.sampling_options import DEFAULT_MAX_TOKENS
from headrace.app.answer.speculation import speculation
from headrace.app.batch.line import Line
from headrace.app.batch.options import sampling_params
from headrace.app.batch.result import Answer
from headrace.models.loading.load import LoadedModel
from headrace.models.text.answer import AnswerText, Completed, TextChunk, ended_by
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.request import Event, Request
from headrace.runtime.metrics.telemetry import StepRecord


@dataclass(frozen=True)
class Asking:
    """Makes requests of lines, for one model. drafted: its engine has a draft model."""

    model: LoadedModel
    prompts: ChatPrompt
    drafted: bool = False

    def request(self, line: Line) -> Request:
        """What the engine is asked. Raises UsageError, ContextLimitError and CheckpointError for this line alone."""
        tokenizer, options = self.model.tokenizer, line.options
        if line.messages is None:
            prompt = tokenizer.encode_prompt(line.prompt)
        else:
            prompt = self.prompts.encode(line.messages, thinking=options.get("thinking"))
        return Request(
            prompt=prompt,
            max_tokens=options.get("max_tokens", DEFAULT_MAX_TOKENS),
            sampling=sampling_params(options, self.model.generation_defaults).with_seed(),
            stop_ids=tokenizer.eos_ids,
            speculate=speculation(options.get("speculate"), draft=self.drafted),
        )


class Answering:
    """The answer to one line as it grows. `latencies`: inter-token latencies so far, in seconds."""

    def __init__(self, line: Line, request: Request, model: LoadedModel, started: float) -> None:
        """started: `time.perf_counter()` when the line was taken up."""
        self.line = line
        self.tokens = 0
        self.latencies: list[float] = []
        self._request = request
        self._started = started
        self._text = AnswerText(model.tokenizer, request, line.options.get("stop", ()))
        self._pieces: list[str] = []
        self._ttft_s: float | None = None

    def take(self, event: Event) -> Answer | None:
        """What the next event of its sequence says; the answer, once that was the last. Raises what it failed with."""
        part = self._text.part(event)
        if isinstance(part, TextChunk | Completed) and part.text:
            if self._ttft_s is None:
                self._ttft_s = time.perf_counter() - self._started
            self._pieces.append(part.text)
        if isinstance(part, TextChunk):
            self.tokens += len(part.step.tokens)
            self._stepped(part.step.record)
        if not isinstance(part, Completed):
            return None
        if part.finished.stop_record is not None:
            self._stepped(part.finished.stop_record)
        return Answer(
            text="".join(self._pieces),
            finished=part.finished,
            ended_by=ended_by(part.finished, self._request),
            seed=None if self._request.sampling.greedy else self._request.sampling.seed,
            ttft_s=self._ttft_s,
            e2e_s=time.perf_counter() - self._started,
        )

    def _stepped(self, record: StepRecord) -> None:
        if record.index:
            self.latencies += [record.latency_s / record.tokens] * record.tokens
