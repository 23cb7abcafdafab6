"""Streams without a network: keep-alives by the clock, clients that leave or do not read."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.app.answer.openai_form import read_chat
from headrace.app.engine.events import Done, Event, Failed, Prefill
from headrace.app.server import respond
from headrace.app.server.answering import Answering
from headrace.app.server.errors import ApiError
from headrace.app.server.openai import ChatForm
from headrace.app.server.respond import DisconnectedError, StreamResponse, while_connected
from headrace.runtime.engine.request import Finished
from tests.support.deltas import delta
from tests.support.summaries import make_summary

CALL = read_chat({"messages": [{"role": "user", "content": "hello"}], "stream": True})
DONE = Done(1, Finished("stop", make_summary()))


def pieces(events: list[tuple[float, Event | ApiError]], keep_alive_s: float) -> list[bytes]:
    """Return a stream's pieces. events: each after so many seconds."""

    async def collect() -> list[bytes]:
        answering = Answering(lambda _: None, [1])

        async def deliver() -> None:
            for pause, event in events:
                await asyncio.sleep(pause)
                if isinstance(event, ApiError):
                    answering.fail(event)
                else:
                    answering.put(1, event)

        delivery = asyncio.create_task(deliver())
        form = ChatForm(CALL, "tiny")
        found = [piece async for piece in respond._pieces(answering, form, None, keep_alive_s)]
        await delivery
        return found

    return asyncio.run(collect())


def test_keep_alives_are_sent_during_prefill() -> None:
    prefill = [(0.02, Prefill(1, done, 30, 0)) for done in range(30)]
    began = time.monotonic()
    found = pieces([*prefill, (0.0, delta(1, "a", (), content="a")), (0.0, DONE)], 0.1)
    assert 2 <= found.count(b": keep-alive\n\n") <= (time.monotonic() - began) / 0.1 + 1
    assert found[-1].endswith(b"data: [DONE]\n\n")
    assert pieces([(0.0, delta(1, "a", (), content="a")), (0.0, DONE)], 60.0).count(b": keep-alive\n\n") == 0


@pytest.mark.parametrize("error", [ApiError(500, "it broke", "x"), Failed(1, "/secret/path", None)])
def test_an_error_ends_the_stream_as_an_object(error: Event | ApiError) -> None:
    found = b"".join(pieces([(0.0, delta(1, "a", (), content="a")), (0.0, error)], 60.0))
    assert b'"error":{' in found
    assert b"secret" not in found
    assert found.endswith(b"data: [DONE]\n\n")


class Client:
    """An ASGI client that leaves at an event, or reads nothing."""

    def __init__(self, *, reads: bool = True) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._reads = reads

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if not self._reads and message["type"] == "http.response.body":
            await asyncio.sleep(60)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x"
        await asyncio.sleep(0)


def test_a_stream_ends_when_its_client_leaves() -> None:
    async def scenario() -> None:
        client = Client()
        left = asyncio.Event()
        serving = asyncio.create_task(StreamResponse(endless(), left.set)({}, client.receive, client.send))
        while len(client.sent) < 3:
            await asyncio.sleep(0)
        assert not left.is_set()
        client.gone.set()
        await serving
        assert left.is_set()

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "WRITE_S", 0.05)

    async def scenario() -> None:
        client = Client(reads=False)
        left = asyncio.Event()
        await StreamResponse(endless(), left.set)({}, client.receive, client.send)
        assert left.is_set()

    asyncio.run(scenario())


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def scenario() -> None:
        client = Client()
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        waiting = asyncio.create_task(while_connected(client.receive, work()))
        await asyncio.sleep(0)
        client.gone.set()
        with pytest.raises(DisconnectedError):
            await waiting
        assert cancelled.is_set()
        assert await while_connected(Client().receive, asyncio.sleep(0, "done")) == "done"

    asyncio.run(scenario())
