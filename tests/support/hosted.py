"""Requests to an `EngineHost` without its process."""

from headrace.app.engine.commands import Generate
from headrace.app.engine.host import EngineHost
from headrace.app.engine.outbox import Send
from headrace.runtime.engine.request import CancelFlag


def begin(host: EngineHost, command: Generate, cancel: CancelFlag, send: Send) -> None:
    """Prepare a request and begin its answer, on this thread."""
    start = host.prepare(command, cancel, send)
    if start is not None:
        start()
