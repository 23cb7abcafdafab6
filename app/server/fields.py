"""JSON bodies of requests: bounded in size and time, typed fields, refusal by name of those that change an answer."""

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.server.errors import ApiError, refused
from headrace.runtime.config.value_types import Flag, ValueType, read_value, shown

T = TypeVar("T")
Body = Mapping[str, object]
MAX_BODY = 32 << 20  # bytes
_MOST_READ = 8 * MAX_BODY
BODY_S = 30.0  # for all of a body to arrive
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_CHOICES = 16
_LEAST_TOP_P = 1e-6


async def read_body(request: Request) -> dict[str, object]:
    """Return the body's JSON object. Raises ApiError for a body that is too large, too slow or no JSON object."""
    announced = request.headers.get("content-length", "0")
    size = int(announced[:20]) if announced.isdecimal() else 0
    if size > _MOST_READ or (size > MAX_BODY and "expect" in request.headers):  # which sends nothing unasked
        raise _too_large()
    data = bytearray()
    arrived = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                arrived += len(piece)
                if arrived > _MOST_READ:
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
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise refused("the body is not UTF-8 text") from None
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise refused(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # a number of thousands of digits
        raise refused("the body is not JSON: a number is too long") from None
    if not isinstance(value, dict):
        raise refused(f"the body must be a JSON object, not {shown(value)}")
    return value


def _no_number(name: str) -> NoReturn:
    raise refused(f"the body is not JSON: {name} is not a number")


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", "request_too_large")


def read(body: Body, name: str, kind: ValueType[T]) -> T | None:
    """Return a field; None if it is missing or null. Raises UsageError."""
    value = body.get(name)
    return None if value is None else read_value(kind, name, value)


def flag(body: Body, name: str) -> bool:
    """Return a field that is true or false; false if it is missing."""
    return read(body, name, Flag()) or False


def mapping(body: Body, name: str) -> Body:
    """Return an object, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(f"{name} must be an object, not {shown(value)}", name)
    return value


def items(body: Body, name: str, max_items: int) -> list[Any]:
    """Return a list, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise refused(f"{name} must be a list, not {shown(value)}", name)
    if len(value) > max_items:
        raise refused(f"{name} has {len(value)} entries, at most {max_items} are allowed", name)
    return value


def refuse(body: Body, names: Collection[str], neutral: Mapping[str, float] | None = None) -> None:
    """Refuse fields that would change the answer and are not supported, unless they are empty, 0 or false.

    neutral: other values that change nothing, by field.
    """
    for name in body:
        if name in names and body[name] and body[name] != (neutral or {}).get(name):
            raise refused(f"{name} is not supported", name)


def _meant(option: str, value: object) -> object:
    """Return an option's value as headrace knows it; None for unset.

    Negative seeds are random and negative lengths unlimited for llama.cpp, -1 keeps all tokens for vLLM's top_k. A
    top_p of 0 keeps the best token alone.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if (option == "seed" and value < 0) or (option == "max_tokens" and value == -1):
        return None
    if option == "top_k" and value == -1:
        return 0
    return _LEAST_TOP_P if option == "top_p" and value == 0 else value


def answer_options(
    body: Body, aliases: Mapping[str, str] | None = None, more: Mapping[str, object] | None = None
) -> AnswerOptions:
    """Return the answer options among the fields. aliases: other names of options. more: options from other fields.

    Values of other servers' clients mean here the same as there (`_meant`). Raises UsageError for a value out of range.
    """
    aliases = aliases or {}
    given = {name: _meant(aliases.get(name, name), body.get(name)) for name in (*OPTIONS, *aliases)}
    options = AnswerOptions.read(given | dict(more or {}), aliases=aliases)
    if len(options.stop or ()) > MAX_STOPS:
        raise refused(f"stop has {len(options.stop or ())} texts, at most {MAX_STOPS} are allowed", "stop")
    if len(options.logit_bias or ()) > MAX_BIASES:
        raise refused(f"logit_bias has more than {MAX_BIASES} tokens", "logit_bias")
    return options
