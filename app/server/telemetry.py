"""`/v1/telemetry`: the engine's events as server-sent events: step records, progress, ends, load.

Answers appear by number only: no text leaves here.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headrace.app.engine.events import BatchStatus, Delta, Died, Done, Event, PeakMeasured, Prefill, Ready
from headrace.app.engine.model_card import ModelCard
from headrace.app.server.form import COMMENT, named

MAX_BEHIND = 256  # events of a reader that is too slow; older ones are dropped


class Telemetry:
    """All readers of the engine's events. `take` is a listener of the engine."""

    def __init__(self) -> None:
        self._readers: set[asyncio.Queue[bytes | None]] = set()

    def take(self, event: Event) -> None:
        """Send an event to all readers."""
        if not self._readers or (found := document(event)) is None:
            return
        piece = named(*found)
        for queue in self._readers:
            _put(queue, piece)

    def stop(self) -> None:
        """End all streams."""
        for queue in self._readers:
            _put(queue, None)

    async def stream(self, card: ModelCard | None, keep_alive_s: float) -> AsyncIterator[bytes]:
        """Yield events until `stop`, first the loaded model's, and comments where none come."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self._readers.add(queue)
        try:
            if card is not None:
                yield named("model", model(card))
            while True:
                piece: bytes | None = COMMENT
                with suppress(TimeoutError):
                    async with asyncio.timeout(keep_alive_s):
                        piece = await queue.get()
                if piece is None:
                    return
                yield piece
        finally:
            self._readers.discard(queue)


def _put(queue: "asyncio.Queue[bytes | None]", piece: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(piece)


def document(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return an event's name and document; None for events without figures."""
    match event:
        case Delta() if event.records:
            steps = [asdict(record) | {"achieved_bandwidth_gb_s": record.achieved_gb_s} for record in event.records]
            return "steps", {"answer": event.id, "ttft_s": event.ttft_s, "steps": steps}
        case Prefill():
            return "prefill", {"answer": event.id, "done": event.done, "total": event.total, "cached": event.reused}
        case Done():
            return "done", {"answer": event.id, "reason": event.reason, "summary": event.summary.document()}
        case BatchStatus():
            states = {str(answer): state for answer, state in event.states.items()}
            blocks = None if event.blocks is None else asdict(event.blocks)
            kv = {"used_bytes": event.kv_used_bytes, "budget_bytes": event.kv_room_bytes, "blocks": blocks}
            return "load", {"states": states, "tokens": event.tokens, "batches": list(event.batches), "kv": kv}
        case PeakMeasured():
            peak = {"measured_peak_gb_s": event.peak.gb_s, "memory_gb_s": event.memory_gb_s}
            return "bandwidth", peak | {"compute_flops": event.compute_flops}
        case Ready():
            return "model", model(event.card)
        case Died():
            return "died", {}
    return None


def model(card: ModelCard) -> dict[str, Any]:
    """Return a loaded model's figures."""
    return {
        "name": card.name,
        "context_limit": card.context_limit,
        "weight_bytes": card.weight_bytes,
        "kv_bytes_per_token": card.kv_bytes_per_token,
        "kv": card.kv,
        "device": card.machine.device_name,
        "measured_peak_gb_s": card.peak.gb_s if card.peak else None,
        "kernels": dict(card.kernels),
    }
