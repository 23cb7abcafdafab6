"""One answer as text: a request's tokens through the detokenizer and the stop strings.

The engine speaks token ids; this is the one place where they become text, for the command line, the chat and the
benchmarks alike. The text is what the model said: whoever shows it on a terminal sanitises it (`app.sanitise`).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.stop_strings import StopMatcher
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.engine import Engine
from headrace.runtime.request import Event, Finished, PrefillProgress, Request, Step


@dataclass(frozen=True, slots=True)
class TextChunk:
    """One step, and the text that became certain with it (often empty: half a character, half a stop string)."""

    text: str
    step: Step


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is over; `text` is what had been held back."""

    text: str
    finished: Finished


Part = PrefillProgress | TextChunk | Completed


def answer(
    engine: Engine, tokenizer: Tokenizer, request: Request, stops: Sequence[str] = ()
) -> Generator[Part, None, None]:
    """Generate, as text. A stop string ends the answer with reason `stop` and is not part of it.

    What `Engine.generate` and `StopMatcher` refuse is refused now, not with the first part.
    """
    return _parts(request, engine.generate(request), tokenizer.answer_stream(), StopMatcher(stops))


def _parts(
    request: Request, events: Iterator[Event], detokenizer: Detokenizer, matcher: StopMatcher
) -> Generator[Part, None, None]:
    stopped = False
    for event in events:
        if isinstance(event, Step):
            text, stopped = matcher.feed(detokenizer.add(event.token))
            yield TextChunk(text, event)
            if stopped:
                request.cancel.set()  # the engine ends the generation before its next step
        elif isinstance(event, Finished):
            rest = ""
            if not stopped:
                certain, stopped = matcher.feed(detokenizer.finish())
                held, at_end = matcher.flush()
                rest, stopped = certain + held, stopped or at_end
            yield Completed(rest, replace(event, reason="stop", stop_id=None) if stopped else event)
        else:
            yield event
