"""One answer: its prompt and request, and the text, steps and times it has so far.

`Answerer.prepare` makes it. Each event of the engine then goes through `take`, in order, on the thread of the model;
`Completed` is the last one. Facts of an answer's end that only this module knows are added in `_end`.

Guard: tests/app/answer/test_answerer.py.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from headrace.app.answer.repetition import RepetitionDetector
from headrace.app.answer.usage import finish_reason, named_figures
from headrace.models.text.answer import AnswerText
from headrace.models.text.events import Completed, Part, TokenReport
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import ToolCall
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.engine.request import EndedBy, Event, Finished, PrefillProgress, Request, SequenceFailed, Step
from headrace.runtime.errors import EngineError
from headrace.runtime.machine.energy import EnergyMeter, EnergyUse
from headrace.runtime.machine.machine_load import CPUMeter, CPUUse
from headrace.runtime.machine.sensors import Sensors
from headrace.runtime.metrics.telemetry import StepRecord, Summary
from headrace.runtime.sampling.params import SamplingParams

TextEvent = Part | SequenceFailed
"""Prefill progress, text of a step, then exactly one `Completed` or `SequenceFailed`."""
_CUT_BY: Mapping[EndedBy, str] = {
    "max_tokens": "max tokens",
    "context_limit": "the context limit",
    "stop_string": "a stop string",
}
"""Words for the ends of `EndedBy` that cut an answer short."""


class EncodedPrompt(Struct, frozen=True):
    """A prompt as token ids.

    opening: text of the answer that the chat template wrote.
    thinking: the prompt ends within a thinking section.
    chat: it was made by the chat template.
    begun: text of the answer that the prompt ends with, after any thinking.
    tools: those that the model may call.
    has_kinds: thinking is told apart from content; else all text is content.
    started: when the request was submitted, on the monotonic clock; by default when the prompt is made.
    waited_s: from then until tokenizing began.
    tokenize_s: time that tokenizing took.
    """

    ids: Sequence[int]
    opening: str = ""
    thinking: bool = False
    chat: bool = False
    begun: str = ""
    tools: ToolUse | None = None
    has_kinds: bool = True
    started: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    tokenize_s: float = 0.0


class Answer:
    """An answer being generated. Times count from `EncodedPrompt.started`.

    From its preparation:
    prompt, request: of the engine.
    unchecked_tools: tools whose calls may have any arguments, and why their schema cannot be guaranteed.
    sensors: read at its first step and at its end, for `energy`; None: not at all. Its user may set them before.

    So far:
    steps: in order; a step that gave no token but the one that ended the turn is not among them (`records` has it).
    chunks: of the prefill: seconds from the start, prompt tokens computed by then.
    calls: of tools, in order.
    reports: log probabilities of its tokens, if they were requested.
    ttft_s: seconds to the first text or tool call; None until then.

    At its end:
    finished: its end; None until then.
    e2e_s: seconds from the start.
    cpu_use: of the machine from the first step on, or from the prefill on if that is too short; None if unknown.
    energy: of the machine from the first step on; None if unknown.
    """

    def __init__(
        self,
        prompt: EncodedPrompt,
        request: Request,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        own_processes: Sequence[int] = (),
        tools: ToolStream | None = None,
        unchecked_tools: Mapping[str, str] | None = None,
        mbu: Callable[[Summary], float | None] = lambda _: None,
    ) -> None:
        """Raises UsageError for an empty stop string.

        stop: texts that end the answer.
        own_processes: see `CPUMeter`.
        tools: see `AnswerText`.
        mbu: computes the MBU of the summary; by default it is unknown.
        """
        self.prompt = prompt
        self.request = request
        self.unchecked_tools: Mapping[str, str] = unchecked_tools or {}
        self.sensors: Sensors | None = None
        self._mbu = mbu
        self._own_processes = own_processes

        self.steps: list[Step] = []
        self.chunks: list[tuple[float, int]] = []
        self.calls: list[ToolCall] = []
        self.reports: list[TokenReport] = []
        self.ttft_s: float | None = None
        self._text = AnswerText(tokenizer, request, stop, tools, thinks=prompt.thinking, has_kinds=prompt.has_kinds)
        self._repetition = RepetitionDetector()
        # Joined when they are read: an answer may have thousands of steps.
        self._pieces: list[str] = []  # all text, tags of thinking sections included
        self._thinking: list[str] = []
        self._content: list[str] = []

        self.finished: Finished | None = None
        self.e2e_s = 0.0
        self.cpu_use: CPUUse | None = None
        self.energy: EnergyUse | None = None
        # Two at most: from the first event on, and from the first step on. A short answer needs the longer one.
        self._meters: list[CPUMeter] = []
        self._energy_meter: EnergyMeter | None = None

    def take(self, event: Event) -> Part:
        """Return the text event of an engine's event. Raises the error that the answer failed with."""
        if isinstance(event, SequenceFailed):
            raise event.error
        is_first_step = isinstance(event, Step) and not self.steps
        if not self._meters or is_first_step:
            self._meters.append(CPUMeter(self._own_processes))
        if is_first_step and self.sensors is not None:
            self._energy_meter = EnergyMeter(self.sensors)
        if isinstance(event, PrefillProgress):
            self.chunks.append((self._elapsed_s(), event.done))
            return event

        part = self._text.step(event) if isinstance(event, Step) else self._text.end(event)
        if self.ttft_s is None and (part.text or part.calls or part.call_deltas):
            self.ttft_s = self._elapsed_s()
        self.calls += part.calls
        if part.text:
            self._pieces.append(part.text)
        if part.thinking:
            self._thinking.append(part.thinking)
        if part.content:
            self._content.append(part.content)
        if isinstance(part, Completed):
            return replace(part, finished=self._end(part.finished))
        self.steps.append(part.step)
        self.reports += part.reports
        self._repetition.add(part.step.tokens)
        return part

    def _end(self, finished: Finished) -> Finished:
        """Take the last readings, and return the end with what the engine does not know."""
        self.e2e_s = self._elapsed_s()
        uses = (meter.use() for meter in reversed(self._meters))  # None, if the time was too short
        self.cpu_use = next((use for use in uses if use is not None), None)
        self.energy = self._energy_meter.use() if self._energy_meter is not None else None
        summary = replace(
            finished.summary,
            ttft_s=self.ttft_s,
            queue_s=self.prompt.waited_s + finished.summary.queue_s,
            tokenize_s=self.prompt.tokenize_s,
            busy=self.busy,
        )
        self.finished = replace(finished, summary=replace(summary, mbu=self._mbu(summary)))
        return self.finished

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.prompt.started

    @property
    def text(self) -> str:
        """The text so far, without the prompt's `opening`."""
        return "".join(self._pieces)

    @property
    def thinking(self) -> str:
        """The thinking so far, without tags."""
        return "".join(self._thinking)

    @property
    def content(self) -> str:
        """The text so far, without thinking."""
        return "".join(self._content)

    @property
    def constrained(self) -> bool:
        """True if its text has to fit a schema, a regular expression or a grammar."""
        return self.request.grammar is not None

    @property
    def result(self) -> str:
        """The content so far, after any thinking section, with the text that the prompt ends with."""
        return self.prompt.begun + self.content

    def check_whole(self) -> None:
        """Raise EngineError for a constrained answer that ended before its text was whole."""
        ended_by = self.end.ended_by
        if self.constrained and ended_by != "end_of_turn":
            by = _CUT_BY.get(ended_by, "a cancellation")
            hint = "raise the limit with -n" if ended_by == "max_tokens" else None
            if self.repeats:
                hint = "it repeats itself: limit its lists and texts (maxItems, maxLength), or use a larger model"
            raise EngineError(f"the answer was cut by {by} before it was whole", hint)

    @property
    def repeats(self) -> bool:
        """True if it has repeated itself for a long time (`app.answer.repetition`)."""
        return self._repetition.repeats

    @property
    def end(self) -> Finished:
        """Its end. The answer has to be over."""
        assert self.finished is not None
        return self.finished

    @property
    def busy(self) -> bool:
        """True if other programs slowed the answer down."""
        return self.cpu_use is not None and self.cpu_use.contended

    @property
    def finish_reason(self) -> str:
        """The reason of its end as OpenAI names it (`usage.finish_reason`)."""
        return finish_reason(self.end, self.calls)

    @property
    def records(self) -> list[StepRecord]:
        """Records of all steps, that of the end-of-turn token included."""
        last = self.finished and self.finished.stop_record
        return [*(step.record for step in self.steps), *([last] if last else [])]

    @property
    def latencies(self) -> list[float]:
        """Inter-token latencies in seconds, without the first step's."""
        return [latency for record in self.records for latency in record.itl_s]

    def sampling(self) -> dict[str, object]:
        """Return the `sampling` object of a result document: as used."""
        return sampling_document(self.request.sampling)

    def timing(self) -> dict[str, object]:
        """Return the `timing` object of a result document."""
        timed = named_figures(self.end.summary, "ttft_s", "prefill_s", "itl_ms", "decode_tokens_per_second")
        return {**timed, "e2e_s": self.e2e_s}


def sampling_document(params: SamplingParams) -> dict[str, object]:
    """Return sampling parameters for JSON, an infinite bias as text."""
    bias = {str(token): value if isfinite(value) else str(value) for token, value in params.logit_bias.items()}
    return {**asdict(params), "logit_bias": bias}
