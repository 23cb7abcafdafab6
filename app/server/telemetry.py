"""`/v1/telemetry`: a model's events as server-sent events: step records, progress, ends, load.

Answers appear by number only: no text leaves here. `app.engine.telemetry` writes the events; `headrace top` reads them.

Guard: tests/app/server/test_figures.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from headrace.app.engine.events import Event, Ready
from headrace.app.engine.model_card import ModelCard
from headrace.app.engine.telemetry import document
from headrace.app.server.engine import ServedEngine
from headrace.app.server.form import COMMENT, named_event

MAX_BEHIND = 256  # events of a reader that is too slow; older ones are dropped


class Telemetry:
    """All readers of an engine's events. `take` is a listener of the engine."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._readers: set[asyncio.Queue[bytes | None]] = set()

    def take(self, event: Event) -> None:
        """Send an event to all readers."""
        if not self._readers:
            return
        if piece := _piece(event):
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
        self._engine.watch(1)
        try:
            if card is not None:
                yield _piece(Ready(card))
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
            self._engine.watch(-1)


def _put(queue: "asyncio.Queue[bytes | None]", piece: bytes | None) -> None:
    """Add a piece, None for the end; of a full queue the oldest is dropped."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(piece)


def _piece(event: Event) -> bytes:
    """Return an event as it is sent; nothing for one that readers do not get."""
    figures = document(event)
    if figures is None:
        return b""
    return named_event(*figures)
