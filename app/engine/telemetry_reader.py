"""Events of a running server, read on a thread from its `/v1/telemetry`; `poll` never blocks.

The connection is made again when it breaks. `headrace top` polls it as the chat polls its engine.

Guards: tests/app/server/test_figures.py and test_several_models.py.
"""

import json
import threading
import time
from collections import deque
from urllib.parse import quote

from headrace.app.engine.events import Event
from headrace.app.engine.http_address import HTTPAddress, events, reason
from headrace.app.engine.telemetry import event_of

_TIMEOUT_S = 30.0  # without a keep-alive
_AGAIN_S = 1.0  # between two attempts
_MAX_UNREAD = 10_000  # events that were not polled


def telemetry_path(model: str | None) -> str:
    """Return the path of a model's events. model: None for the model of the server's start."""
    return "/v1/telemetry" if model is None else f"/v1/telemetry?model={quote(model, safe='')}"


class TelemetryReader:
    """Reads the events of one of a server's models. problem: the latest failure, one line; "" while connected."""

    def __init__(self, address: HTTPAddress, model: str | None = None) -> None:
        """Begin to read. model: its name; None: the model of the server's start."""
        self._address = address
        self._path = telemetry_path(model)
        self._events: deque[Event] = deque(maxlen=_MAX_UNREAD)
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
            except Exception as error:  # a server may send anything
                self.problem = reason(error)
            self._closed.wait(_AGAIN_S)

    def _read(self) -> None:
        """Read until the connection ends. Raises the errors of connections, and those of other documents."""
        connection = self._address.connection(_TIMEOUT_S)
        try:
            response = self._address.ask(connection, self._path)
            self.problem = ""
            for name, data in events(response):
                if (event := event_of(name, json.loads(data))) is not None:
                    self._events.append(event)
                if self._closed.is_set():
                    return
        finally:
            connection.close()


def wait_for_model(reader: TelemetryReader, seconds: float) -> list[Event]:
    """Return the first events, at least one, or none after some seconds."""
    deadline = time.monotonic() + seconds
    events = reader.poll()
    while not events and time.monotonic() < deadline:
        time.sleep(0.02)
        events = reader.poll()
    return events
