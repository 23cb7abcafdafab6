"""Address of an HTTP server, and server-sent events from it.

Used by a chat with --connect, `headrace top` and `launch`. Errors may have texts of the server: `reason` makes them
safe to show.

Guard: tests/app/engine/test_remote.py.
"""

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from headrace.app.output.sanitise import safe_line
from headrace.runtime.errors import UsageError

# Bounds in bytes on a server's lines and documents.
_LONGEST_LINE = 16 << 20
_LONGEST_BODY = 4 << 20
_LONGEST_MESSAGE = 500  # characters of a server's error that are shown


# Connection and usual port, by scheme.
_CONNECTIONS: Mapping[str, tuple[type[HTTPConnection], int]] = {
    "http": (HTTPConnection, 80),
    "https": (HTTPSConnection, 443),
}


class ServerError(HTTPException):
    """An answer with an error: its message, in one line. code: its name for programs; "" without one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(" ".join(message.split())[:_LONGEST_MESSAGE])
        self.code = code


class HTTPAddress:
    """A server's address and key. url: without /v1."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: with or without scheme and /v1. Raises UsageError."""
        full_url = url
        if "//" not in url:
            full_url = f"http://{url}"
        parts = urlsplit(full_url)
        try:
            if parts.scheme not in _CONNECTIONS or not parts.hostname:
                raise ValueError
            self._connect, port = _CONNECTIONS[parts.scheme]
            self._host = parts.hostname
            self._port = parts.port or port  # `port` raises for one that is no number
        except ValueError:
            raise UsageError(f"URL: {url!r:.100} is no address of a server", "such as http://127.0.0.1:8080") from None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers: dict[str, str] = {}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def connection(self, timeout_s: float) -> HTTPConnection:
        """Return a connection, which the first request opens."""
        return self._connect(self._host, self._port, timeout=timeout_s)

    def ask(self, connection: HTTPConnection, path: str, body: Mapping[str, object] | None = None) -> HTTPResponse:
        """Send a request, and return its response. Raises OSError and HTTPException, ServerError for other statuses."""
        method = "GET"
        data = None
        headers = self._headers
        if body is not None:
            method = "POST"
            data = json.dumps(body).encode()
            headers = {**headers, "Content-Type": "application/json"}
        connection.request(method, self._path + path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response.status, response.read(_LONGEST_BODY))
        return response

    def load_model(self, model: str, timeout_s: float) -> None:
        """Have a server of headrace load a model, by the shortest request that needs it. Raises as `ask`."""
        connection = self.connection(timeout_s)
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        try:
            self.ask(connection, "/v1/messages/count_tokens", body).read()
        finally:
            connection.close()

    def get(self, path: str, timeout_s: float) -> Any:
        """Return a JSON document. Raises OSError, HTTPException and ValueError."""
        connection = self.connection(timeout_s)
        try:
            return json.loads(self.ask(connection, path).read(_LONGEST_BODY))
        finally:
            connection.close()


def reason(error: Exception) -> str:
    """Return an error of a request as one short line, which no text of the server can make unsafe to show."""
    if isinstance(error, KeyError):
        return f"the server's answer lacks {safe_line(str(error))[:_LONGEST_MESSAGE]}"
    text = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return safe_line(text[:_LONGEST_MESSAGE])


def events(response: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield the name, perhaps empty, and the data of server-sent events."""
    # event: done
    # data: {"id": 1}
    #                      an empty line ends an event; OpenAI's have data alone
    name = ""
    while line := response.readline(_LONGEST_LINE):
        if line.startswith(b"event:"):
            name = line.removeprefix(b"event:").strip().decode()
        elif line.startswith(b"data:"):
            yield name, line.removeprefix(b"data:").strip().decode()
        elif not line.strip():
            name = ""


def _error(status: int, body: bytes) -> ServerError:
    """Return the error of a response, in OpenAI's form or any other."""
    try:
        error = json.loads(body)["error"]
        return ServerError(str(error["message"]), str(error.get("code") or ""))
    except (ValueError, TypeError, KeyError):
        return ServerError(f"the server answered with status {status}")
