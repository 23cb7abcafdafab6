"""Answers over HTTP: one document, or a stream of server-sent events with keep-alives. A client that leaves cancels.

`answer` is the way of every call: wait for its model, submit a command per choice, wait for the first event, so that an
early error still has an HTTP status, then send the rest in the call's form.

Guard: tests/app/server/test_respond.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.app.answer.call import Call
from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Event, Prefill
from headrace.app.engine.model_card import ModelCard
from headrace.app.server.answering import Answering
from headrace.app.server.errors import api_error
from headrace.app.server.form import Form, json_bytes
from headrace.app.server.served_models import ServedModels
from headrace.models.text.thinking import Thinking, read_tags
from headrace.runtime.sampling.params import SEEDS

WRITE_S = 30.0  # for a client to take a piece
# "X-Accel-Buffering" has nginx pass pieces on at once.
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LONGEST_HEADER = 4000  # characters: proxies refuse longer heads, of 8 KiB or so

T = TypeVar("T")


class DisconnectedError(Exception):
    """The client has left."""


class DocumentResponse(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json_bytes(content)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves. Raises DisconnectedError then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    call: Call,
    models: ServedModels,
    form_of: Callable[[ModelCard], Form],
    defaults: AnswerOptions,
    keep_alive_s: float,
) -> Response:
    """Return the response to a call. Raises ApiError for one that fails before its first event.

    form_of: makes the form of the answers, once the model is known.
    defaults: options that the request does not set.
    keep_alive_s: seconds of a stream without an event after which it sends a keep-alive.
    """
    engine, card = await models.ready(call.model)
    form = form_of(card)
    watched = call.steps and call.stream
    requests = commands(call, engine.new_ids(call.choices), card, defaults)
    answering = engine.submit(requests, watched=watched)
    try:
        longest_wait = None
        if call.stream:
            longest_wait = keep_alive_s
        first = await answering.next(longest_wait)
        headers = _unchecked(first)
        if not call.stream:
            while first is not None:
                form.take(*first)
                first = None if answering.over else await answering.next()
            return DocumentResponse(form.document(), headers=headers)
    except BaseException:  # a cancelled task, too: its client is gone, so the answer ends
        answering.leave()
        raise
    return StreamResponse(_pieces(answering, form, first, keep_alive_s), answering.leave, headers)


def commands(call: Call, ids: Sequence[int], card: ModelCard, defaults: AnswerOptions) -> list[Generate]:
    """Return one command per choice. defaults: options that the request does not set."""
    options = replace(call.options.over(defaults), thinking=thinking_of(call, card, defaults))
    prompts: Sequence[str | None] = call.prompts or (None,)
    made = []
    for number, generation in enumerate(ids):
        seed = options.seed
        if options.seed is not None:
            seed = (options.seed + number % call.count) % SEEDS  # the answers to one prompt count up from it
        made.append(
            Generate(
                generation,
                call.messages,
                replace(options, seed=seed),
                prompt=prompts[number // call.count],
                suffix=call.suffix,
                logprobs=call.logprobs,
                begun=read_tags(call.continue_text),
                tools=call.tools,
                explain=call.explain,
            )
        )
    return made


def thinking_of(call: Call, card: ModelCard, defaults: AnswerOptions) -> Thinking | None:
    """Return the option of thinking that a call means for a model."""
    return call.thinking(defaults.thinking, thinks=card.thinks, has_levels=card.thinking_levels)


def _unchecked(first: tuple[int, Event] | None) -> dict[str, str]:
    """Return the header that names tools whose calls may have any arguments."""
    match first:
        case (_, Prefill(unchecked_tools=names)) if names:
            return {"Headrace-Unchecked-Tools": ", ".join(names)[:_LONGEST_HEADER]}
    return {}


async def _pieces(
    answering: Answering, form: Form, first: tuple[int, Event] | None, keep_alive_s: float
) -> AsyncIterator[bytes]:
    """Yield the stream of an answer.

    first: its first event, which was taken already; None if none came within `keep_alive_s`.
    Keep-alives go by the clock: events of a long prefill send nothing.
    """
    try:
        piece = form.begin()
        if first is not None:
            piece += form.take(*first)
        yield piece
        due = time.monotonic() + keep_alive_s
        while not answering.over:
            arrived = await answering.next(max(0.0, due - time.monotonic()))
            piece = b""
            if arrived is not None:
                piece = form.take(*arrived)
            if piece or time.monotonic() >= due:
                due = time.monotonic() + keep_alive_s
                yield piece or form.keep_alive
        yield form.end()
    except Exception as error:  # the status is sent: the stream alone can say it
        yield form.failed(api_error(error))


class StreamResponse(Response):
    """A stream of server-sent events. leave: called when it ends, or when the client has left."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        leave: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]  # starlette sets that of an empty body; a stream has none
        self._pieces = pieces
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI has it
        try:
            await while_connected(receive, self._send_all(send))
        except (DisconnectedError, TimeoutError, OSError):
            pass  # nobody reads
        finally:
            self._leave()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if piece:
                    await _write(send, piece, more=True)
        await _write(send, b"", more=False)


async def _write(send: Send, piece: bytes, *, more: bool) -> None:
    """Send a piece. Raises TimeoutError for a client that does not take it."""
    async with asyncio.timeout(WRITE_S):
        await send({"type": "http.response.body", "body": piece, "more_body": more})
