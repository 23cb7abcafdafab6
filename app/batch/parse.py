"""A line of the input as a request, or why it is none.

    {"prompt": "Why?", "system": "Be brief.", "temperature": 0.7}     as `headrace run` is asked
    {"messages": [{"role": "user", "content": "Why?"}], "id": "q1"}
    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}    the OpenAI batch form

A request is what will be asked, whatever way it was written: the line over what holds for all lines. Its `digest` tells
requests apart, so that a result found in an output is taken for the answer to nothing else.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.app.batch.line import BadLine, Defaults, Form, Line
from headrace.app.batch.openai_form import form_of, read_body
from headrace.app.batch.options import shown
from headrace.app.batch.plain_form import read_plain
from headrace.models.checkpoint.json_object import repeated_key
from headrace.runtime.errors import HeadraceError, UsageError


def parse_lines(lines: Iterable[bytes], defaults: Defaults) -> list[Line | BadLine]:
    """Every line that is not blank. A name that was there before is an error of the later line."""
    found: list[Line | BadLine] = []
    names: dict[tuple[bool, str], int] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        line = parse_line(raw, number, defaults)
        if line.name is not None:
            first = names.setdefault((line.form == "plain", str(line.name)), number)
            if first != number and isinstance(line, Line):
                error = UsageError(f"{shown(line.name)} is the name of line {first} already")
                line = _bad(raw, number, line.name, line.form, error)
        found.append(line)
    return found


def parse_line(raw: bytes, number: int, defaults: Defaults) -> Line | BadLine:
    """The request of one line, or what is wrong with it."""
    name: str | int | None = None
    form: Form = "plain"
    try:
        told = _object(raw)
        if "custom_id" in told or "body" in told:
            form = form_of(told)
            name = _name(told, "custom_id")
            if name is None:
                raise UsageError("a request in the OpenAI batch form needs a custom_id")
            messages, prompt, options = read_body(told, form, defaults)
        else:
            name = _name(told, "id")
            messages, prompt, options = read_plain(told, defaults)
        options = {**defaults.options, **options}
    except HeadraceError as error:
        return _bad(raw, number, name, form, error)
    called = {"line": number} if name is None else {"name": name}
    digest = _digest([defaults.model, defaults.identity, form, called, messages, prompt, sorted(options.items())])
    return Line(number, name, form, messages, prompt, options, digest)


def _bad(raw: bytes, number: int, name: str | int | None, form: Form, error: HeadraceError) -> BadLine:
    return BadLine(number, name, form, error, _digest([number, raw.hex()]))


def _object(raw: bytes) -> dict[str, Any]:
    """The line's JSON object. A key that is there twice has no one meaning, and is refused."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"the line is not JSON: {error.msg} at character {error.colno}") from None
    except RecursionError:
        raise UsageError("the line is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"the line is not a JSON object but {shown(value)}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (repeated := repeated_key(pairs)) is not None:
        raise UsageError(f"the key {shown(repeated)} is there twice")
    return dict(pairs)


def _no_number(name: str) -> Any:
    raise UsageError(f"{name} is not a number that JSON has")


def _name(told: Mapping[str, Any], key: str) -> str | int | None:
    name = told.get(key)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise UsageError(f"{key} must be a text or a whole number, not {shown(name)}")
    return name


def _digest(identity: object) -> str:
    """128 bits: what no two requests of any input share."""
    # Sorted, since the order of an object's keys means nothing; a tuple is written as a list.
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
