"""Events of an answer as text: its steps and its end, which `models.text.answer` makes.

Every surface gets these, also in another process than the engine's: nothing here imports MLX or a tokenizer. Texts are
the model's, unsanitised.

Guard: tests/models/text/test_answer.py.
"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.engine.request import Finished, PrefillProgress, Step
from headrace.runtime.metrics.telemetry import StepRecord


class TokenReport(Struct, frozen=True):
    """A token and its log probability, and the best tokens of its step in order.

    text: U+FFFD stands for bytes of a part of a character.
    logprob: under the model's own distribution.
    top: text and log probability of each of the best tokens.
    data: the token's bytes if its text has U+FFFD, and they are known; None: those of the text.
    top_data: likewise of each of the best tokens; empty if all are None.
    """

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]
    data: bytes | None = None
    top_data: Sequence[bytes | None] = ()


class TextChunk(Struct, frozen=True):
    """One step, and the text that it completed (often empty: half a character, half a stop string).

    text: all of it, whatever its kind.
    step: without the tokens after a stop string.
    opening, thinking, closing, content: the text by its kind; opening and closing are the tags around thinking, with
        the line ends next to them. Text that may be half a tag comes here later than in `text`.
    pieces: the text that each of its tokens completed; they join to `text`.
    rejected: the texts of its rejected draft tokens.
    calls: tool calls that it completed; their markup is not in the text.
    call_deltas: arguments of calls, where they can be told before a call is complete.
    reports: of its tokens, if log probabilities were requested.
    """

    text: str
    step: Step
    opening: str = ""
    thinking: str = ""
    closing: str = ""
    content: str = ""
    pieces: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()
    reports: tuple[TokenReport, ...] = ()

    @property
    def record(self) -> StepRecord:
        """The record of its step."""
        return self.step.record


class Completed(Struct, frozen=True):
    """The end of an answer. Its texts and calls are the rest that was held back, as those of a `TextChunk`."""

    text: str
    finished: Finished
    opening: str = ""
    thinking: str = ""
    closing: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()

    @property
    def record(self) -> StepRecord | None:
        """The record of a step that gave no token but the end of the turn."""
        return self.finished.stop_record

    @property
    def pieces(self) -> tuple[str, ...]:
        """Its text, as that of a step."""
        return (self.text,)

    @property
    def rejected(self) -> tuple[str, ...]:
        """Nothing: it has no draft tokens."""
        return ()

    @property
    def is_empty(self) -> bool:
        """True if nothing was held back, and no step ended the answer alone."""
        has_output = self.text or self.thinking or self.content or self.calls or self.call_deltas
        return self.record is None and not has_output


Part = PrefillProgress | TextChunk | Completed
