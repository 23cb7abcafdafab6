"""HTTP/1.1 connections of uvicorn: bounded in number, and in time for the head of a request.

Where there are too many, the one that has been idle longest is closed for a new one. Waiting requests are bounded by
`ServedEngine`, which answers them; uvicorn's own limit would count idle connections and answer none. `serve.py` passes
`http_options` to uvicorn. docs/workarounds.md has the upstream issue.

Guard: tests/app/server/test_slow_clients.py.
"""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0  # for the request line and all headers, also of an idle new connection
MAX_CONNECTIONS = 1024  # fewer, if the process may not open so many files
_OTHER_FILES = 64  # files besides connections that the process may have open


class BoundedProtocol(H11Protocol):
    """Closes connections whose request does not arrive in time, where uvicorn itself waits for ever, or that idle."""

    _head_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._watch_head()
        if len(self.connections) > _max_connections():
            # This connection is idle, too: it is the only one, and is closed, if all others are being answered.
            idle = [each for each in self.connections if isinstance(each, BoundedProtocol) and each.is_idle]
            min(idle, key=lambda each: each._idle_since).transport.abort()

    @property
    def is_idle(self) -> bool:
        """True without a request that is being answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Note the time."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # first: it parses the data, which changes `their_state`
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """Start the timer if a request's head is incomplete; stop it once the head is complete.

        Between two requests uvicorn's `timeout_keep_alive` applies, until the first bytes of the next one.
        """
        if self.conn.their_state is not h11.IDLE:  # IDLE until a whole head has come
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.transport.close()


def _max_connections() -> int:
    """Return how many connections the process may have, within its limit of open files."""
    return max(1, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES))


def http_options() -> dict[str, Any]:
    """Return uvicorn's options of connections."""
    return {
        "http": BoundedProtocol,
        "ws": "none",  # no WebSockets
        "h11_max_incomplete_event_size": 64 << 10,  # bytes of a request's head
        "timeout_keep_alive": 60,  # seconds until an idle connection is closed
    }
