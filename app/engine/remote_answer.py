"""One answer from a server's stream of chunks: text as the chat stores it, and figures."""

import time
from collections.abc import Mapping
from typing import Any

from headrace.app.engine.commands import Generate
from headrace.app.engine.events import AnswerEvent, Delta, Done, Event
from headrace.app.engine.http_address import ServerError
from headrace.app.engine.telemetry import event_of
from headrace.models.text.thinking import CLOSE, OPEN
from headrace.runtime.metrics.telemetry import Percentiles, StepRecord, Summary


class RemoteAnswer:
    """Chunks in, events out. thinks: thinking becomes a <think> section of the text. own: the server reports steps."""

    def __init__(self, command: Generate, *, thinks: bool, own: bool) -> None:
        self._id = command.id
        self._thinks = thinks
        self._own_server = own
        self._ttft_s: float | None = None
        self._last = command.submitted  # when the latest text came
        self._latencies: list[float] = []
        self._pieces = 0
        self._thinking = False
        self._usage: Mapping[str, Any] = {}
        self._cut = False  # by a limit
        self._done: Done | None = None  # of headrace's own server

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of a chunk. Raises ServerError for an error in the stream, KeyError for other objects."""
        if error := chunk.get("error"):
            raise ServerError(str(error.get("message", error))[:500], str(error.get("code") or ""))
        self._usage = chunk.get("usage") or self._usage
        if own := chunk.get("headrace"):
            return self._own(own)
        text = ""
        for choice in chunk["choices"]:
            self._cut = self._cut or choice.get("finish_reason") == "length"
            delta = choice.get("delta") or {}
            text += self._text(delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))
        return [self._delta(text)] if text else []

    def end(self) -> Event:
        """Return the end of the answer, after the last chunk."""
        if self._done is not None:
            return self._done
        return Done(self._id, "length" if self._cut else "stop", self._summary(), False)

    def _own(self, own: Mapping[str, Any]) -> list[Event]:
        """Return the event that headrace's own server reports."""
        found = event_of(str(own["event"]), {**own["data"], "id": self._id})
        if isinstance(found, Done):
            self._done = found
            return []
        return [found] if isinstance(found, AnswerEvent) else []

    def _text(self, reasoning: str | None, content: str | None) -> str:
        text = ""
        if reasoning and self._thinks:
            text += ("" if self._thinking else f"{OPEN}\n") + reasoning
            self._thinking = True
        if content:
            text += (f"\n{CLOSE}\n\n" if self._thinking else "") + content
            self._thinking = False
        return text

    def _delta(self, text: str) -> Delta:
        now = time.monotonic()
        latency = now - self._last
        self._last = now
        if self._ttft_s is None:
            self._ttft_s = latency
        else:
            self._latencies.append(latency)
        record = StepRecord(self._pieces, 0, latency, 0, 0, 0, 0, 0, 0, 0)
        self._pieces += 1
        return Delta(self._id, text, () if self._own_server else (record,), self._ttft_s)

    def _summary(self) -> Summary:
        tokens = int(self._usage.get("completion_tokens") or self._pieces)
        prompt = int(self._usage.get("prompt_tokens") or 0)
        cached = int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        decoding = sum(self._latencies)
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
            step_s=decoding / len(self._latencies) if self._latencies else None,
            itl=Percentiles.of(self._latencies),
            tpot_s=decoding / (tokens - 1) if tokens > 1 and decoding else None,
            weight_bytes_per_step=0,
            kv_bytes_per_token=0,
            kv_cache_bytes=0,
            achieved_gb_s=None,
            peak_memory_bytes=0,
        )
