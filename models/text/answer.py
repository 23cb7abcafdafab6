"""Answers as text: a request's tokens through the detokenizer and the stop strings.

The text is the model's, unsanitised: sanitise it before printing (`app.output.sanitise`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.models.text.stop_strings import StopMatcher
from headrace.models.text.thinking import ThinkingGate
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.models.text.tools.stream import ToolStream
from headrace.runtime.engine.request import Event, Failed, Finished, PrefillProgress, Request, Step


@dataclass(frozen=True, slots=True)
class TextChunk:
    """One step, and the text that it completed (often empty: half a character, half a stop string).

    step: without the tokens after a stop string. pieces: the text that each of its tokens completed; they join to
    `text`. rejected: the texts of its rejected draft tokens. calls: tool calls that it completed; their markup is not
    in the text. call_deltas: arguments of calls, where they can be told before a call is complete.
    """

    text: str
    step: Step
    pieces: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of an answer; `text` and `calls` are the rest that was held back."""

    text: str
    finished: Finished
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()


Part = PrefillProgress | TextChunk | Completed
EndedBy = Literal["end_of_turn", "stop_string", "max_tokens", "context_limit", "cancelled"]


def ended_by(finished: Finished, request: Request) -> EndedBy:
    """Return the reason that ended an answer, more precise than its finish reason."""
    match finished.reason:
        case "cancelled":
            return "cancelled"
        case "stop":
            return "end_of_turn" if finished.stop_id is not None else "stop_string"
        case "length":
            count = finished.summary.completion_tokens
            limit = request.max_tokens
            return "max_tokens" if limit is not None and count >= limit else "context_limit"


class AnswerText:
    """Conversion of one request's events to text. A stop string ends it with reason `stop` and is left out.

    The text of an answer that was cut ends before a character that is incomplete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        stops: Sequence[str] = (),
        tools: ToolStream | None = None,
        *,
        thinks: bool = False,
    ) -> None:
        """tools: separates calls from text. thinks: the prompt has begun a thinking section, in which no stop string
        counts. Raises UsageError for an empty stop string.
        """
        self._request = request
        self._tokenizer = tokenizer
        self._tools = tools
        self._detokenizer = tokenizer.answer_stream(None if tools is None else tools.marks, thinks=thinks)
        self._matcher = StopMatcher(stops)
        self._gate = ThinkingGate(thinks=thinks) if stops else None
        self._stopped = False
        self._count = 0  # tokens of the answer

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.found

    def part(self, event: Event) -> Part:
        """Convert one event of the engine. Raises the error of a `Failed`."""
        if isinstance(event, Step):
            return self._step(event)
        if isinstance(event, Finished):
            rest = ""
            calls = tuple[ToolCall, ...]()
            if not self._stopped:
                cut = event.reason != "stop"
                text = self._detokenizer.finish(cut=cut)
                calls = ()
                if self._tools is not None:
                    text, calls = self._tools.finish(text, cut=cut)
                thought, text = self._behind_thinking(text, final=True)
                certain, self._stopped = self._matcher.feed(text)
                held, at_end = self._matcher.flush()
                rest = thought + certain + held
                self._stopped = self._stopped or at_end
            finished = replace(event, reason="stop", stop_id=None) if self._stopped else event
            return Completed(rest, finished, calls, self._call_deltas())
        if isinstance(event, Failed):
            raise event.error
        return event

    def _step(self, step: Step) -> TextChunk:
        pieces = list[str]()
        calls = list[ToolCall]()
        for used, token in enumerate(step.tokens, 1):
            text = self._detokenizer.add(token)
            if self._tools is not None:
                text, completed = self._tools.feed(text)
                calls += completed
            thought, text = self._behind_thinking(text)
            text, self._stopped = self._matcher.feed(text)
            pieces.append(thought + text)
            self._count += 1
            if self._stopped:
                self._request.cancel.set(after=self._count)  # the engine ends the generation before its next step
                return self._chunk(pieces, _truncated(step, used), calls)
        return self._chunk(pieces, step, calls)

    def _behind_thinking(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Return the part of a text that belongs to the thinking section, and the rest, where stop strings count."""
        if self._gate is None:
            return "", text
        thought, text = self._gate.feed(text)
        return thought, text + (self._gate.flush() if final else "")

    def _chunk(self, pieces: Sequence[str], step: Step, calls: Sequence[ToolCall]) -> TextChunk:
        rejected = tuple(self._tokenizer.decode([token], skip_special=False) for token in step.rejected)
        return TextChunk("".join(pieces), step, tuple(pieces), rejected, tuple(calls), self._call_deltas())

    def _call_deltas(self) -> tuple[CallDelta, ...]:
        return self._tools.take_deltas() if self._tools is not None else ()


def _truncated(step: Step, used: int) -> Step:
    """Return the step with only its first `used` tokens, the last of them sampled."""
    if used == step.record.tokens:
        return step
    logprobs = step.logprobs and step.logprobs[:used]
    return Step(step.tokens[:used], replace(step.record, accepted=used - 1), logprobs)
