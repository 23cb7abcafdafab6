"""JSON bodies of requests, bounded in size and time.

Every endpoint with a body reads it here. Fields are checked later (`app.answer.fields`).

Guard: tests/app/server/test_body.py.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from headrace.app.config.bounded_input import json_object
from headrace.app.server.errors import ApiError, refused
from headrace.models.checkpoint.side_file import check_parts, is_deep
from headrace.runtime.errors import UsageError

MAX_BODY = 32 << 20  # bytes
_MAX_READ = 8 * MAX_BODY  # bytes that are read and dropped so that the client gets its error; beyond, it is cut off
BODY_S = 30.0  # for all of a body to arrive
MAX_LEVELS = 100  # of objects and lists; a tool's schema has up to 60
_MAX_VALUES = 1 << 20  # of objects and lists; each takes some 60 bytes


async def read_body(request: Request) -> dict[str, object]:
    """Return the body's JSON object. Raises ApiError for a body that is too large, too slow or no JSON object."""
    announced = request.headers.get("content-length", "0")
    size = int(announced[:20]) if announced.isdecimal() else 0  # twenty digits are too large in any case
    if size > _MAX_READ or (size > MAX_BODY and "expect" in request.headers):  # which sends nothing unasked
        raise _too_large()
    data = bytearray()
    arrived = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                arrived += len(piece)
                if arrived > _MAX_READ:
                    raise _too_large()
                # A body that is too large is read all the same: a client that is sending hears no answer.
                if max(arrived, size) <= MAX_BODY:
                    data += piece
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} seconds", "timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body is incomplete", "invalid_request") from None
    if max(arrived, size) > MAX_BODY:
        raise _too_large()
    return parse_object(bytes(data))


def parse_object(data: bytes) -> dict[str, object]:
    """Return a JSON object. Raises ApiError for anything else."""
    try:
        check_parts(data, _MAX_VALUES)
    except ValueError:
        raise refused(f"the body has more than {_MAX_VALUES} values") from None
    try:
        value = json_object(data, "the body")
    except UsageError as error:
        message = str(error)
        if error.hint:
            message += f" ({error.hint})"
        raise refused(message) from None
    if is_deep(value, MAX_LEVELS):
        raise refused("the body is nested too deeply")
    return value


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", "request_too_large")
