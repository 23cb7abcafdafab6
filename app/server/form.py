"""Interface of an endpoint's answers: events in, server-sent events or one document out.

`respond.py` drives a form: `begin`, `take` for each event, then `end` or `failed` in a stream, or `document`. The forms
are in `openai.py`, `responses.py` and `anthropic.py`.

Guard: tests/app/server/test_openai.py.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.app.engine.events import Event
from headrace.app.output.document import finite
from headrace.app.server.errors import ApiError


class Form(Protocol):
    """The answers of one request in the form of an endpoint. Pure: no clock but `created`, no network."""

    keep_alive: bytes
    """Sent while nothing else is."""

    def begin(self) -> bytes:
        """Return the beginning of a stream."""
        ...

    def take(self, choice: int, event: Event) -> bytes:
        """Take an event of a choice; return the text that a stream sends for it, perhaps none."""
        ...

    def end(self) -> bytes:
        """Return the end of a stream, after the last choice."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the end of a stream in which an error occurred."""
        ...

    def document(self) -> dict[str, object]:
        """Return the whole answer, after its last event."""
        ...


def data_events(documents: Iterable[object]) -> bytes:
    """Return server-sent events without names, one for each document."""
    return b"".join(b"data: " + json_bytes(document) + b"\n\n" for document in documents)


def named_event(name: str, document: Mapping[str, object]) -> bytes:
    """Return one server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(document) + b"\n\n"


def json_bytes(document: object) -> bytes:
    """Return compact JSON. Lone surrogates, which UTF-8 cannot have, are escaped."""
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a surrogate; or infinity, which a client may have sent as 1e999 and gets again as null
        return json.dumps(finite(document), separators=(",", ":")).encode()


COMMENT = b": keep-alive\n\n"
"""A server-sent event that clients ignore."""
