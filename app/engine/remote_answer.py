"""An answer of a server: chunks of a chat completion's stream in, events of the engine out.

headrace's own server reports each step in a chunk with a `headrace` object, after the chunks with its text. A chunk
with text of another server counts as a step: its latency is the time since the one before, and its bytes are unknown.

`RemoteEngine` makes one for each answer, and calls `take` and `end` on that answer's thread.

Guard: tests/app/engine/test_remote.py.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from headrace.app.engine.commands import Generate
from headrace.app.engine.events import AnswerEvent, Delta, Done, Event
from headrace.app.engine.http_address import ServerError
from headrace.app.engine.telemetry import count_of, event_of, textless
from headrace.models.text.events import Completed, TextChunk
from headrace.models.text.thinking import CLOSING, OPENING
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.engine.request import Finished, FinishReason
from headrace.runtime.metrics.telemetry import Percentiles, StepRecord, Summary

AnyPart = TypeVar("AnyPart", TextChunk, Completed)


class RemoteAnswer:
    """Chunks in, events out.

    is_whole: its last chunk has come, or the line that ends a stream.
    """

    def __init__(self, command: Generate, *, is_headrace: bool) -> None:
        """is_headrace: the server is headrace's own, which reports the steps after their text."""
        self.is_whole = False
        # Text and figures so far. `_thinking` and `_content` are emptied into each delta.
        self._id = command.id
        self._is_headrace = is_headrace
        self._ttft_s: float | None = None
        self._last = command.submitted  # when the latest text came
        self._latencies: list[float] = []
        self._pieces = 0  # of text, each of which counts as a step
        self._thinking = ""
        self._content = ""
        self._has_thinking = False  # its opening tag was sent
        self._has_content = False  # content was sent: no thinking comes after it
        self._usage: Mapping[str, Any] = {}
        self._cut = False  # by a limit
        self._done: Done | None = None  # of headrace's own server

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of a chunk. Raises ServerError for an error in the stream, KeyError for other objects."""
        if error := chunk.get("error"):
            raise ServerError(str(error.get("message", error)), str(error.get("code") or ""))
        self._usage = as_mapping(chunk.get("usage")) or self._usage
        if extension := chunk.get("headrace"):
            return self._reported(extension)
        for choice in chunk["choices"]:
            finish_reason = choice.get("finish_reason")
            self.is_whole = self.is_whole or finish_reason is not None
            self._cut = self._cut or finish_reason == "length"
            delta = choice.get("delta") or {}
            self._thinking += delta.get("reasoning_content") or delta.get("reasoning") or ""
            self._content += delta.get("content") or ""
        if self._is_headrace or not (self._thinking or self._content):
            return []  # headrace's own server reports a step after its text
        return [self._delta([self._record()])]

    def end(self) -> list[Event]:
        """Return the end of the answer, after the last chunk. Raises ServerError if it was not the last."""
        if not self.is_whole:
            raise ServerError("the server broke off its answer")
        reason: FinishReason = "length" if self._cut else "stop"
        done = self._done or Done(self._id, Finished(reason, self._summary()))
        if not self._thinking and not self._content:
            return [done]
        rest = Completed("", done.end)
        return [Delta(self._id, [self._with_text(rest)], self._ttft_s, has_steps=False), done]

    def _reported(self, extension: Mapping[str, Any]) -> list[Event]:
        """Return the event that headrace's own server reports."""
        event = event_of(str(extension["event"]), {**extension["data"], "id": self._id})
        if isinstance(event, Done):
            self._done = event
            return []
        if isinstance(event, Delta):
            self._ttft_s = event.ttft_s
            return [self._delta(event.records)]
        return [event] if isinstance(event, AnswerEvent) else []

    def _delta(self, records: Sequence[StepRecord]) -> Delta:
        """Return the text that has come, with the records of its steps."""
        first, *others = map(textless, records)  # the text cannot be divided among the steps: the first gets all
        return Delta(self._id, [self._with_text(first), *others], self._ttft_s, has_steps=False)

    def _with_text(self, part: AnyPart) -> AnyPart:
        """Return the part with the text that has come, and tags around thinking. Thinking after content is content."""
        thinking = self._thinking
        content = self._content
        if self._has_content:
            content = thinking + content
            thinking = ""
        opening = ""
        if thinking and not self._has_thinking:
            opening = OPENING
            self._has_thinking = True
        closing = ""
        if content and not self._has_content:
            self._has_content = True
            if self._has_thinking:
                closing = CLOSING
        self._thinking = ""
        self._content = ""
        text = opening + thinking + closing + content
        return replace(part, text=text, opening=opening, thinking=thinking, closing=closing, content=content)

    def _record(self) -> StepRecord:
        """Return the record of another server's step: the text that has come since the last one."""
        now = time.monotonic()
        latency = now - self._last
        self._last = now
        if self._ttft_s is None:
            self._ttft_s = latency
        else:
            self._latencies.append(latency)
        self._pieces += 1
        return StepRecord(
            index=self._pieces - 1,
            context=0,
            latency_s=latency,
            weight_bytes=0,
            kv_bytes_read=0,
            kv_bytes_written=0,
            kv_used_bytes=0,
            kv_allocated_bytes=0,
            active_memory_bytes=0,
            peak_memory_bytes=0,
        )

    def _summary(self) -> Summary:
        """Return the figures that another server's answer has: token counts of its `usage`, and times measured here."""
        tokens = count_of(self._usage.get("completion_tokens")) or self._pieces
        prompt = count_of(self._usage.get("prompt_tokens"))
        cached = count_of(as_mapping(self._usage.get("prompt_tokens_details")).get("cached_tokens"))
        decoding = sum(self._latencies)
        step_s = None
        if self._latencies:
            step_s = decoding / len(self._latencies)
        tpot_s = None
        if tokens > 1 and decoding:
            tpot_s = decoding / (tokens - 1)
        return Summary(
            prompt_tokens=prompt,
            reused_tokens=cached,
            prefill_tokens=max(0, prompt - cached),
            completion_tokens=tokens,
            steps=self._pieces,
            prefill_s=0.0,
            first_step_s=None,
            ttft_s=self._ttft_s,
            step_latency=Percentiles.of(self._latencies),
            step_s=step_s,
            itl=Percentiles.of(self._latencies),
            tpot_s=tpot_s,
            weight_bytes_per_step=0,
            kv_bytes_per_token=0,
            kv_cache_bytes=0,
            achieved_gb_s=None,
            peak_memory_bytes=0,
        )
