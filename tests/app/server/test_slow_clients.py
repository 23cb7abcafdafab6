"""Clients that send half a head, half a body, or nothing: each is left after its time."""

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from headrace.app.server import body, connection
from headrace.app.server.connection import http_options
from headrace.app.server.errors import ApiError
from headrace.app.server.serve import listening_socket
from tests.support.patience import PATIENCE_S

WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def serving(data: list[bytes]) -> list[bytes]:
    """Return what a server sends for each of these before it closes the connection."""
    listening = listening_socket("127.0.0.1", 0)
    config = uvicorn.Config(PlainTextResponse("hello"), lifespan="off", log_config=None, **http_options())
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    received = []
    for piece in data:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(piece)
        async with asyncio.timeout(PATIENCE_S):
            received.append(await reader.read())
        writer.close()
    server.should_exit = True
    await task
    return received


def test_a_head_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    assert asyncio.run(serving([b"", WHOLE[:20]])) == [b"", b""]
    monkeypatch.setattr(connection, "HEAD_S", PATIENCE_S)
    (whole,) = asyncio.run(serving([WHOLE]))
    assert b"200 OK" in whole


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"type": "http.request", "body": b"{", "more_body": True}], 408),
        ([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], 400),
    ],
)
def test_a_body_has_to_arrive_in_time(
    monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], status: int
) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.05)
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        if (found := next(waiting, None)) is None:
            await asyncio.sleep(PATIENCE_S)
        return found or {}

    async def read() -> None:
        await body.read_body(Request({"type": "http", "headers": []}, receive))

    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    assert caught.value.status == status
