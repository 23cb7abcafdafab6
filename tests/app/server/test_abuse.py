"""Requests that no honest client sends: each gets one error or a closed connection, and the server goes on."""

import json
import resource
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.app.server.conftest import Starter
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _the_server_goes_on(server: ServerProcess) -> Any:
    yield
    server.until(status="ok", requests=0)
    assert "Traceback" not in server.errors


def error(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    assert "\n" not in found["message"]
    assert "/" not in found["message"].replace("/v1", "")  # no path
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"{}", b"\xff\xfe", b'{"messages": NaN}', b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000, b'{"a": ' * 5000, json.dumps({"messages": [{}] * 20_000}).encode(),
        json.dumps({"messages": HELLO, "temperature": [[]]}).encode(), b'{"messages": {"role": "user"}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
def test_invalid_bodies_are_refused(client: httpx.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400
    error(response)


def test_a_body_that_is_too_large_is_refused(client: httpx.Client) -> None:
    response = client.post(CHAT, content=(b"x" * (1 << 20) for _ in range(33)))
    assert response.status_code == 413
    assert error(response)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "127.0.0.1.evil.example:8080"}, 403),
        ({"Host": "[::1].evil.example"}, 403),
    ],
)
def test_requests_with_a_foreign_origin_are_refused(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    response = client.post(CHAT, json={"messages": HELLO}, headers=headers)
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers
    error(response)


def test_unknown_paths_and_methods_are_refused(client: httpx.Client) -> None:
    assert error(client.get("/v1/nothing"))["code"] == "not_found"
    assert "Ollama" in error(client.post("/api/chat", json={"model": "x"}))["message"]
    assert error(client.get(CHAT))["code"] == "method_not_allowed"
    assert client.get(CHAT).headers["Allow"] == "POST"
    assert "endpoint" in error(client.post("/v1/embeddings", json={}))["message"]
    assert client.head("/").status_code == 200
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404


def raw(server: ServerProcess, data: bytes) -> bytes:
    """Send bytes, and return everything that comes until the server closes or answers."""
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


def test_malformed_request_heads_are_refused(server: ServerProcess) -> None:
    assert b" 400 " in raw(server, b"hello\r\n\r\n")
    assert b" 400 " in raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"x" * (128 << 10) + b"\r\n\r\n")
    assert b" 403 " in raw(server, b"GET / HTTP/1.0\r\n\r\n")  # no Host
    assert b" 400 " in raw(server, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n"
    assert b" 413 " in raw(server, head.encode())


def test_the_server_survives_half_requests_and_dropped_connections(server: ServerProcess) -> None:
    host, port = server.root.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{"
    for data in (b"", b"GE", b"GET / HTTP/1.1\r\nHo", head):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(data)


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    host, port = server.root.removeprefix("http://").split(":")
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(one + one + last)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert [received.count(status) for status in (b"HTTP/1.1 200", b"HTTP/1.1 404")] == [2, 1]
    assert received.index(b"HTTP/1.1 404") > received.rindex(b"HTTP/1.1 200")


def test_a_body_that_is_too_large_is_answered_while_it_is_sent(server: ServerProcess) -> None:
    """A client that sends all of it before it reads."""
    size = 40 << 20
    with socket.create_connection(_address(server), PATIENCE_S) as sending:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        sending.sendall(head.encode() + b"x" * size)
        assert sending.recv(99).startswith(b"HTTP/1.1 413 ")


def test_a_log_line_is_one_line(start: Starter) -> None:
    server = start()
    httpx.get(f"{server.root}/%0d%0aGET%20/forged%20200%1b[31m\u2028")
    server.end(signal.SIGINT)
    assert "GET /%0D%0AGET%20/forged%20200%1B%5B31m%E2%80%A8 404 " in server.errors
    assert "\x1b" not in server.errors


def test_errors_have_cors_headers_for_allowed_origins(start: Starter) -> None:
    server = start("--api-key", "secret", "--allow-origin", "https://page.example")
    page = "https://page.example"
    refused = httpx.post(f"{server.root}{CHAT}", json={}, headers={"Origin": page})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
    other = httpx.post(f"{server.root}{CHAT}", json={}, headers={"Origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_the_longest_idle_connection_is_closed_at_the_limit(start: Starter) -> None:
    server = start()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))  # type: ignore[attr-defined,unused-ignore]
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(_address(server), PATIENCE_S)) for _ in range(80)]
        for connection in idle[-2:]:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(99).startswith(b"HTTP/1.1 200 ")
        assert server.health()["status"] == "ok"
        with suppress(ConnectionResetError):
            assert idle[0].recv(99) == b""


def _address(server: ServerProcess) -> tuple[str, int]:
    found = urlsplit(server.root)
    return str(found.hostname), int(found.port or 0)
