"""`/v1/chat/completions` and `/v1/completions`: answers as chunks of a stream or one document.

Source of the shapes: OpenAI's API reference, sections Chat, Streaming and Completions.

Guard: tests/app/server/test_openai.py.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from secrets import token_hex

from headrace.app.answer.call import Call
from headrace.app.answer.openai_form import chat_choice, text_choice, written_call
from headrace.app.answer.token_reports import chat_logprobs, text_logprobs
from headrace.app.answer.tools import custom_input
from headrace.app.answer.usage import finish_reason, openai_usage
from headrace.app.engine.events import Delta, Done, Event
from headrace.app.engine.telemetry import document
from headrace.app.server.errors import ApiError
from headrace.app.server.explain import prefix_of
from headrace.app.server.form import COMMENT, data_events
from headrace.app.server.parts import AnswerParts, CallPart, Part, token_reports

# Fields of a `delta`, by the kind of its text.
_TEXT_FIELDS = {"content": "content", "thinking": "reasoning_content"}


class OpenAIForm(ABC):
    """Answers in either form: chunks with an identifier in common, choices, and their usage."""

    keep_alive = COMMENT
    prefix: str
    """Beginning of an answer's identifier."""
    document_type: str
    """`object` of the document."""
    chunk_type: str
    """`object` of a stream's chunks."""

    def __init__(self, call: Call, model: str) -> None:
        """model: the name of the one that answers."""
        self._call = call
        self._answers = [AnswerParts() for _ in range(call.choices)]
        self._extension: dict[str, object] = {}  # the `headrace` object of the document
        self._about = {"id": f"{self.prefix}-{token_hex(12)}", "created": int(time.time()), "model": model}

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def take(self, choice: int, event: Event) -> bytes:
        """Return the chunks of an event, figures after its text."""
        text = b""
        if isinstance(event, Delta | Done):
            text = data_events(self._chunks(choice, event))
        return text + self._figures(event)

    @abstractmethod
    def _chunks(self, choice: int, event: Delta | Done) -> list[dict[str, object]]:
        """Take an event; return its chunks."""

    @abstractmethod
    def _choices(self) -> list[dict[str, object]]:
        """Return the choices of the document."""

    def _figures(self, event: Event) -> bytes:
        """Return a chunk of what only headrace's own clients ask for."""
        extra = prefix_of(self._call, event)
        self._extension |= extra
        figures = None
        if self._call.steps:
            figures = document(event)
        if figures is not None:
            name, data = figures
            extra |= {"event": name, "data": data}
        if extra:
            return data_events([{**self._head(self.chunk_type), "choices": [], "headrace": extra}])
        return b""

    def end(self) -> bytes:
        """Return the chunk with the usage, if asked for, and the end mark."""
        usage = b""
        if self._call.include_usage:
            usage = data_events([{**self._head(self.chunk_type), "choices": [], "usage": self._usage()}])
        return usage + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an object of the stream, and the end mark."""
        return data_events([error.openai()]) + b"data: [DONE]\n\n"

    def document(self) -> dict[str, object]:
        """Return the whole answer."""
        completion = {**self._head(self.document_type), "choices": self._choices(), "usage": self._usage()}
        if self._extension:
            completion["headrace"] = self._extension
        return completion

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._about["id"], "object": kind, **self._about, "system_fingerprint": "headrace"}

    def _chunk(
        self, index: int, text: Mapping[str, object], *, logprobs: object = None, reason: str | None = None
    ) -> dict[str, object]:
        """Return a chunk of one choice. text: its `text` or its `delta`."""
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head(self.chunk_type), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, object]:
        return openai_usage([answer.finished for answer in self._answers], self._call.count)


class ChatForm(OpenAIForm):
    """Answers as chat completions."""

    prefix = "chatcmpl"
    document_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def begin(self) -> bytes:
        """Return a first chunk per choice, with its role."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return data_events(self._chunk(index, first) for index in range(len(self._answers)))

    def _chunks(self, choice: int, event: Delta | Done) -> list[dict[str, object]]:
        answer = self._answers[choice]
        deltas = [delta for part in answer.take(event) if (delta := self._delta(part))]
        if isinstance(event, Done):  # the text of custom tools is known once their JSON is whole
            deltas += [
                {"tool_calls": [{"index": index, "custom": {"input": custom_input(call.arguments)}}]}
                for index, call in enumerate(answer.calls)
                if call.name in self._call.custom
            ]

        if isinstance(event, Done):
            chunks = [self._chunk(choice, {"delta": delta}) for delta in deltas]
            return [*chunks, self._chunk(choice, {"delta": {}}, reason=finish_reason(event.end, answer.calls))]
        tokens = token_reports(event)
        if not tokens:
            return [self._chunk(choice, {"delta": delta}) for delta in deltas]
        # Log probabilities go with the first delta of an event, or with an empty text if the event has none.
        first, *others = deltas or [{"content": ""}]
        chunks = [self._chunk(choice, {"delta": first}, logprobs=chat_logprobs(tokens))]
        return [*chunks, *(self._chunk(choice, {"delta": delta}) for delta in others)]

    def _delta(self, part: Part) -> dict[str, object] | None:
        """Return the `delta` of a part; None for a piece of a custom tool's JSON, whose text comes at the end."""
        if not isinstance(part, CallPart):
            return {_TEXT_FIELDS[part.kind]: part.text}
        if part.name in self._call.custom:
            begun = {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": ""}}
            if part.first:
                return {"tool_calls": [{"index": part.index, **begun}]}
            return None
        more: Mapping[str, object] = {"function": {"arguments": part.arguments}}
        if part.first:
            more = written_call(part.id, part.name, part.arguments, self._call.custom)
        return {"tool_calls": [{"index": part.index, **more}]}

    def _choices(self) -> list[dict[str, object]]:
        custom = self._call.custom
        return [
            chat_choice(
                index,
                answer.finished,
                answer.content,
                thinking=answer.thinking,
                calls=[written_call(call.id, call.name, call.arguments, custom) for call in answer.calls],
                reports=answer.tokens if self._call.logprobs is not None else None,
            )
            for index, answer in enumerate(self._answers)
        ]


class CompletionForm(OpenAIForm):
    """Answers as text completions."""

    prefix = "cmpl"
    document_type = "text_completion"
    chunk_type = "text_completion"

    def _chunks(self, choice: int, event: Delta | Done) -> list[dict[str, object]]:
        answer = self._answers[choice]
        position = answer.length
        answer.take(event)
        if isinstance(event, Done):
            return [self._chunk(choice, {"text": ""}, reason=event.end.reason)]
        tokens = token_reports(event)
        if not event.text and not tokens:
            return []
        reports = text_logprobs(tokens, position) if tokens else None
        return [self._chunk(choice, {"text": event.text}, logprobs=reports)]

    def _choices(self) -> list[dict[str, object]]:
        with_reports = self._call.logprobs is not None
        return [
            text_choice(index, answer.finished, answer.text, answer.tokens if with_reports else None)
            for index, answer in enumerate(self._answers)
        ]
