"""Parts of a streamed answer: thinking, content and tool calls.

All forms (`form.py`) collect an answer in `AnswerParts`: for a stream they write the parts that `take` returns, for one
document they read its attributes at the end.

Guards: tests/app/server/test_openai.py and test_responses.py.
"""

from collections.abc import Iterable, Iterator
from secrets import token_hex
from typing import Literal

from msgspec import Struct

from headrace.app.engine.events import Delta, Done
from headrace.models.text.adapt_messages import object_of
from headrace.models.text.events import TextChunk, TokenReport
from headrace.models.text.tools.call import CallDelta
from headrace.runtime.engine.request import Finished

TextKind = Literal["thinking", "content"]


class TextPart(Struct, frozen=True):
    """Text of one kind, never empty."""

    kind: TextKind
    text: str


class CallPart(Struct, frozen=True):
    """A tool call, or a part of one.

    id: of the call, the same in all of its parts.
    index: among the answer's calls.
    name: of the tool.
    arguments: JSON text of an object, or more of it.
    first: the part begins the call.
    """

    id: str
    index: int
    name: str
    arguments: str
    first: bool = True

    @property
    def value(self) -> object:
        """The arguments as an object. Text that a limit cut becomes its only field, as in a history."""
        return object_of(self.arguments)


Part = TextPart | CallPart


def token_reports(delta: Delta) -> list[TokenReport]:
    """Return the log probabilities of a delta's tokens, if they were requested."""
    return [report for part in delta.parts if isinstance(part, TextChunk) for report in part.reports]


def joined(deltas: Iterable[CallDelta]) -> dict[int, CallDelta]:
    """Return one delta a call, by the calls' indices."""
    by_index: dict[int, CallDelta] = {}
    for delta in deltas:
        before = by_index[delta.index].text if delta.index in by_index else ""
        by_index[delta.index] = CallDelta(delta.index, delta.name, before + delta.text)
    return by_index


class AnswerParts:
    """One answer so far.

    end: None until it has ended.
    length: of its text, in characters.
    calls: those that are whole.
    tokens: log probabilities of its tokens, if they were requested.
    """

    def __init__(self) -> None:
        self.end: Finished | None = None
        self.length = 0
        self.calls: list[CallPart] = []
        self.tokens: list[TokenReport] = []
        self._texts: list[str] = []
        self._thinking: list[str] = []
        self._content: list[str] = []
        self._ids: dict[int, str] = {}  # of the calls that have begun

    def take(self, event: Delta | Done) -> list[Part]:
        """Add an event, and return its parts in order."""
        if isinstance(event, Done):
            self.end = event.end
            return []
        thinking = event.thinking
        content = event.content
        self.tokens.extend(token_reports(event))
        self._texts.append(event.text)
        self.length += len(event.text)
        self._thinking.append(thinking)
        self._content.append(content)
        texts = (TextPart("thinking", thinking), TextPart("content", content))
        return [*(part for part in texts if part.text), *self._call_parts(event)]

    def _call_parts(self, event: Delta) -> Iterator[CallPart]:
        """Yield the parts of calls in order: arguments that have come, or a whole call where none came before."""
        deltas = joined(delta for part in event.parts for delta in part.call_deltas)
        calls = dict(enumerate((call for part in event.parts for call in part.calls), len(self.calls)))
        for index in sorted(deltas.keys() | calls.keys()):
            first = index not in self._ids
            identifier = self._ids.setdefault(index, f"call_{token_hex(12)}")
            if (call := calls.get(index)) is not None:
                self.calls.append(CallPart(identifier, index, call.name, call.arguments))
            if (delta := deltas.get(index)) is not None:
                yield CallPart(identifier, index, delta.name, delta.text, first=first)
            elif first:
                yield self.calls[index]

    @property
    def finished(self) -> Finished:
        """Its end. The answer has to be over."""
        assert self.end is not None
        return self.end

    @property
    def text(self) -> str:
        """Its text as the model wrote it, thinking included."""
        return "".join(self._texts)

    @property
    def content(self) -> str:
        """Its text, without thinking."""
        return "".join(self._content)

    @property
    def thinking(self) -> str:
        """Its thinking."""
        return "".join(self._thinking)
