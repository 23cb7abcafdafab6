"""Events of a running server, read on a thread from its `/v1/telemetry`; `poll` never blocks.

The connection is made again when it breaks.
"""

import json
import threading
import time
from collections import deque
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from headrace.app.engine.events import Event
from headrace.app.engine.telemetry import event_of
from headrace.runtime.errors import UsageError

_PATH = "/v1/telemetry"
_TIMEOUT_S = 30.0  # without a keep-alive
_AGAIN_S = 1.0  # between two attempts
_KEPT = 10_000  # events that were not polled
_LONGEST_LINE = 4 << 20


class TelemetryReader:
    """Reads one server's events. problem: the latest failure, one line; "" while connected."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: of the server, with or without /v1. Raises UsageError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError
            secure = parts.scheme == "https"
            self._address = parts.hostname, parts.port or (443 if secure else 80)
        except ValueError:
            raise UsageError(f"URL: {url!r:.100} is no address of a server", "such as http://127.0.0.1:8080") from None
        self._connect = HTTPSConnection if secure else HTTPConnection
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._closed = threading.Event()
        self.problem = "connecting"
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._read()
                self.problem = "the server ended the connection"
            except (OSError, HTTPException, ValueError, TypeError, KeyError) as error:
                self.problem = str(getattr(error, "strerror", None) or error or type(error).__name__)
            self._closed.wait(_AGAIN_S)

    def _read(self) -> None:
        """Read until the connection ends. Raises OSError, HTTPException, and the errors of other documents."""
        connection = self._connect(*self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", _PATH, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HTTPException(f"status {response.status} for {_PATH}")
            self.problem, name = "", ""
            while not self._closed.is_set() and (line := response.readline(_LONGEST_LINE)):
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: ") and (event := event_of(name, json.loads(line[6:]))) is not None:
                    self._events.append(event)
        finally:
            connection.close()


def wait_for_model(reader: TelemetryReader, seconds: float) -> list[Event]:
    """Return the first events, at least one, or none after some seconds."""
    deadline = time.monotonic() + seconds
    while not (events := reader.poll()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return events
