"""Parts of a streamed answer: thinking, text and tool calls.

Thinking is separated as by `models.text.thinking.split_thinking`, which takes whole text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal

from headrace.app.answer.token_reports import TokenReport
from headrace.app.engine.events import Delta, Done
from headrace.models.text.adapt_messages import object_of
from headrace.models.text.half_mark import half_length
from headrace.models.text.thinking import CLOSE, OPEN

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of one kind, never empty."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, or a part of one. arguments: JSON text of an object. index: among the answer's calls.

    first: the part begins the call.
    """

    id: str
    index: int
    name: str
    arguments: str
    first: bool = True

    @property
    def value(self) -> Any:
        """The arguments as an object. Text that a limit cut becomes its only field, as in a history."""
        return object_of(self.arguments)


Part = TextPart | CallPart


class AnswerParts:
    """One answer so far. done: its end."""

    def __init__(self, *, thinks: bool) -> None:
        """thinks: see `PartSplitter`."""
        self.done: Done | None = None
        self.calls: list[CallPart] = []
        self.tokens: list[TokenReport] = []
        self._splitter = PartSplitter(thinks=thinks)
        self._texts: dict[Kind, list[str]] = {"content": [], "reasoning": []}
        self._ids: dict[int, str] = {}  # of the calls that have begun

    def take(self, event: Delta | Done) -> list[Part]:
        """Add an event, and return its parts in order."""
        if isinstance(event, Done):
            self.done = event
            parts = self._splitter.finish()
        else:
            self.tokens.extend(event.tokens)
            parts = self._splitter.feed(event.text)
        for part in parts:
            self._texts[part.kind].append(part.text)
        return [*parts, *self._call_parts(event)] if isinstance(event, Delta) else [*parts]

    def _call_parts(self, event: Delta) -> Iterator[CallPart]:
        """Yield the parts of calls in order: arguments that have come, or a whole call where none came before."""
        deltas = {delta.index: delta for delta in event.call_deltas}
        done = len(self.calls)
        calls = dict(enumerate(event.calls, done))
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
    def content(self) -> str:
        """Its text, without thinking."""
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str:
        """Its thinking."""
        return "".join(self._texts["reasoning"])


class PartSplitter:
    """Splits one answer. thinks: the model has thinking sections; otherwise all text is the answer."""

    def __init__(self, *, thinks: bool) -> None:
        self._state: Literal["start", "thinking", "gap", "answer"] = "start" if thinks else "answer"
        self._held = ""
        self._begun = False  # the section has text

    def feed(self, text: str) -> list[TextPart]:
        """Return the parts that are certain so far."""
        self._held += text
        parts: list[TextPart] = []
        if self._state == "start":
            self._start()
        if self._state == "thinking":
            self._thinking(parts)
        if self._state == "gap":
            self._held = self._held.lstrip("\n")
            self._state = "answer" if self._held else "gap"
        if self._state == "answer" and self._held:
            parts.append(TextPart("content", self._held))
            self._held = ""
        return parts

    def finish(self) -> list[TextPart]:
        """Return the text that was held back, at the end of the answer."""
        held = self._held
        self._held = ""
        kind: Kind = "reasoning" if self._state == "thinking" else "content"
        held = held.strip("\n") if self._state in ("thinking", "gap") else held
        return [TextPart(kind, held)] if held else []

    def _start(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._state, self._held = "thinking", begin[len(OPEN) :]
        elif not OPEN.startswith(begin):
            self._state = "answer"

    def _thinking(self, parts: list[TextPart]) -> None:
        thinking, tag, rest = self._held.partition(CLOSE)
        if not self._begun:
            thinking = thinking.lstrip("\n")
        if tag:
            thinking = thinking.rstrip("\n")
            self._held = rest
            self._state = "gap"
        else:
            certain = thinking[: len(thinking) - _uncertain(thinking)]
            thinking, self._held = certain, thinking[len(certain) :]
        if thinking:
            self._begun = True
            parts.append(TextPart("reasoning", thinking))


def _uncertain(text: str) -> int:
    """Return the number of characters at the end that may be dropped: line ends, and the beginning of the tag."""
    length = half_length(text, CLOSE)
    rest = text[: len(text) - length]
    return length + len(rest) - len(rest.rstrip("\n"))
