"""Events of an answer as text: its steps and its end, which `models.text.answer` makes.

Every surface gets these, also in another process than the engine's: nothing here imports MLX or a tokenizer. Texts are
the model's, unsanitised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.engine.request import Finished, PrefillProgress, Step


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token's text and log probability, and the best tokens of its step in order."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """One step, and the text that it completed (often empty: half a character, half a stop string).

    step: without the tokens after a stop string. thinking, content: the text by its kind, without tags and without line
    ends next to them; text that may be half a tag comes here later than in `text`. pieces: the text that each of its
    tokens completed; they join to `text`. rejected: the texts of its rejected draft tokens. calls: tool calls that it
    completed; their markup is not in the text. call_deltas: arguments of calls, where they can be told before a call is
    complete. reports: of its tokens, if log probabilities were requested.
    """

    text: str
    step: Step
    thinking: str = ""
    content: str = ""
    pieces: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()
    reports: tuple[TokenReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of an answer; the texts and `calls` are the rest that was held back."""

    text: str
    finished: Finished
    thinking: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()


Part = PrefillProgress | TextChunk | Completed
