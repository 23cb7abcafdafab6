"""Answers as text: a request's tokens through the detokenizer and the stop strings.

The engine speaks token ids; this is the one place where they become text, for the command line, the chat and the
benchmarks alike. The text is what the model said: whoever shows it on a terminal sanitises it (`app.output.sanitise`).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.models.text.stop_strings import StopMatcher
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Failed, Finished, PrefillProgress, Request, Step


@dataclass(frozen=True, slots=True)
class TextChunk:
    """One step, and the text that became certain with it (often empty: half a character, half a stop string).

    Of a step that said more than the answer has, `step` is what it has of it. guessed: characters at the beginning of
    `text` that became certain with tokens that had been guessed.
    """

    text: str
    step: Step
    guessed: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is over; `text` is what had been held back."""

    text: str
    finished: Finished


Part = PrefillProgress | TextChunk | Completed
EndedBy = Literal["end_of_turn", "stop_string", "max_tokens", "context_limit", "cancelled"]


def ended_by(finished: Finished, request: Request) -> EndedBy:
    """What the finish reason of a completed answer leaves open: which stop, which limit."""
    match finished.reason:
        case "cancelled":
            return "cancelled"
        case "stop":
            return "end_of_turn" if finished.stop_id is not None else "stop_string"
        case "length":
            said, most = finished.summary.completion_tokens, request.max_tokens
            return "max_tokens" if most is not None and said >= most else "context_limit"


class AnswerText:
    """One request's events, in order, as text. A stop string ends it with reason `stop` and is not part of it."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: Sequence[str] = ()) -> None:
        """Raises UsageError for an empty stop string."""
        self._request = request
        self._detokenizer = tokenizer.answer_stream()
        self._matcher = StopMatcher(stops)
        self._stopped = False
        self._said = 0  # tokens up to where it stopped

    def part(self, event: Event) -> Part:
        """What an event of the engine says. Raises what a `Failed` failed with."""
        if isinstance(event, Step):
            return self._step(event)
        if isinstance(event, Finished):
            rest = ""
            if not self._stopped:
                certain, self._stopped = self._matcher.feed(self._detokenizer.finish())
                held, at_end = self._matcher.flush()
                rest, self._stopped = certain + held, self._stopped or at_end
            return Completed(rest, replace(event, reason="stop", stop_id=None) if self._stopped else event)
        if isinstance(event, Failed):
            raise event.error
        return event

    def _step(self, step: Step) -> TextChunk:
        pieces = []
        for used, token in enumerate(step.tokens, 1):
            text, self._stopped = self._matcher.feed(self._detokenizer.add(token))
            pieces.append(text)
            self._said += 1
            if self._stopped:
                self._request.cancel.set(after=self._said)  # the engine ends the generation before its next step
                return _chunk(pieces, _cut(step, used))
        return _chunk(pieces, step)


def _chunk(pieces: Sequence[str], step: Step) -> TextChunk:
    """pieces: the text of each token; the last token of a step is the model's own, those before it were guessed."""
    return TextChunk("".join(pieces), step, sum(map(len, pieces[: step.record.accepted])))


def _cut(step: Step, used: int) -> Step:
    """A step that ended the answer with so many of its tokens."""
    if used == step.record.tokens:
        return step
    logprobs = step.logprobs and step.logprobs[:used]
    return Step(step.tokens[:used], replace(step.record, accepted=used - 1), logprobs)


def answer(
    engine: Engine, tokenizer: Tokenizer, request: Request, stops: Sequence[str] = ()
) -> Generator[Part, None, None]:
    """Generate, as text: the parts of `AnswerText`.

    What `Engine.generate` and `StopMatcher` refuse is refused now, not with the first part.
    """
    return _parts(engine.generate(request), AnswerText(tokenizer, request, stops))


def _parts(events: Iterator[Event], text: AnswerText) -> Generator[Part, None, None]:
    for event in events:
        yield text.part(event)
