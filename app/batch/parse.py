"""Reading the lines of the input as requests, or as errors.

    {"prompt": "Why?", "system": "Be brief.", "temperature": 0.7}     as for `headrace run`
    {"messages": [{"role": "user", "content": "Why?"}], "id": "q1"}
    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}    the OpenAI batch form

A line's options go before the defaults of all lines. A request's `digest` depends on everything that decides its
answer and the form of its result, so that a result found in an output is never taken for another request's. A new
field of `Call` that changes either has to be in `_identity`; a change of its value for old lines makes every batch
start anew. Guards: tests/app/batch/test_parse.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.app.answer.call import Call
from headrace.app.answer.fields import read
from headrace.app.answer.messages import read_messages
from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.answer.tools import tool_fields
from headrace.app.batch.line import BadLine, BatchDefaults, BatchLine, Form, refuse_unknown, with_system
from headrace.app.batch.openai_form import form_of, read_body
from headrace.app.config.bounded_input import DOCUMENT, json_object, read_bounded, without_mark
from headrace.runtime.config.value_types import Flag, Text, read_value, shown
from headrace.runtime.errors import HeadraceError, UsageError

STDIN = "-"
_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_PLAIN = frozenset({*OPTIONS, *_TOOLS, "id", "prompt", "messages", "system", "raw"})


def read_lines(source: str | None) -> list[bytes]:
    """Read all lines of a file, or of standard input: `-`, or None where it is no terminal. Raises UsageError."""
    if source is None and sys.stdin.isatty():
        raise UsageError("no requests", "headrace batch IN.jsonl, or pipe lines in")
    file = None if source in (None, STDIN) else Path(str(source))
    return without_mark(read_bounded(file, DOCUMENT), str(file or "standard input")).split(b"\n")


def parse_lines(lines: Iterable[bytes], defaults: BatchDefaults) -> list[BatchLine | BadLine]:
    """Return every line that is not blank. A name used before is an error of the later line."""
    parsed: list[BatchLine | BadLine] = []
    # Lines by name: `id` and `custom_id` are apart, since results in one form do not have the other.
    names: dict[tuple[bool, str], int] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        line = parse_line(raw, number, defaults)
        if line.name is not None:
            # The ids 1 and "1" are one name: a reader may not tell them apart.
            first = names.setdefault((line.form == "plain", str(line.name)), number)
            if first != number and isinstance(line, BatchLine):
                error = UsageError(f"{shown(line.name)} is the name of line {first} already")
                line = _bad(raw, number, line.name, line.form, error)
        parsed.append(line)
    return parsed


def parse_line(raw: bytes, number: int, defaults: BatchDefaults) -> BatchLine | BadLine:
    """Return the request of one line, or its error."""
    name: str | int | None = None
    form: Form = "plain"
    try:
        given = json_object(raw, "the line", unique=True)
        if "custom_id" in given or "body" in given:
            form = "chat.completion"  # of the error of a wrong name or url
            name = _name(given, "custom_id")
            form = form_of(given)
            if name is None:
                raise UsageError("a request in the OpenAI batch form needs a custom_id")
            call = read_body(given, form, defaults)
        else:
            name = _name(given, "id")
            call = read_plain(given, defaults)
    except HeadraceError as error:
        return _bad(raw, number, name, form, error)
    options = call.options.over(defaults.options)
    called = {"line": number} if name is None else {"name": name}
    return BatchLine(number, name, form, call, options, _digest(_identity(call, form, called, defaults)))


def _identity(call: Call, form: Form, called: Mapping[str, object], defaults: BatchDefaults) -> list[object]:
    """Return everything that decides a request's answer. called: the request's name, or the number of its line."""
    messages = None if call.prompts else call.messages
    text = call.prompts[0] if call.prompts else ""
    own_keys = call.options.given().keys()
    values = call.options.over(defaults.options).given()
    # The settings file's own numbers: reading an option may make 1.0 of 1, and a digest of JSON tells them apart.
    values |= {key: value for key, value in defaults.written.items() if key not in own_keys}
    with_recommended = {**defaults.recommended, **values}
    # Greedy decoding takes no recommendation: filters change nothing, and `AnswerOptions.resolved` drops the penalty.
    if with_recommended.get("temperature"):
        values = with_recommended
    if isinstance(values.get("schema"), Mapping):  # the order of its properties decides the answer
        values["schema"] = json.dumps(values["schema"])
    identity: list[object] = [defaults.model, defaults.identity, form, called, messages, text, sorted(values.items())]
    if call.tools is not None:  # their definitions stand in the prompt, in their order
        identity.append([json.dumps(call.tools.definitions), call.tools.choice, call.tools.parallel])
    if call.custom:  # their calls are written as texts, those of functions as JSON arguments
        identity.append(sorted(call.custom))
    # Unset ones are left out; JSON tells the others apart: a number, a text, a truth value.
    return identity + [part for part in (call.logprobs, call.effort, call.budget) if part is not None]


def _bad(raw: bytes, number: int, name: str | int | None, form: Form, error: HeadraceError) -> BadLine:
    return BadLine(number, name, form, error, _digest([number, raw.hex()]))


def _name(given: Mapping[str, object], key: str) -> str | int | None:
    name = given.get(key)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise UsageError(f"{key} must be a text or a whole number, not {shown(name)}")
    return name


def _digest(identity: object) -> str:
    # Keys are sorted, since their order in an object means nothing. 32 hexadecimal digits are 128 bits: no two requests
    # have the same by chance, and each line of the output has one.
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def read_plain(given: Mapping[str, object], defaults: BatchDefaults) -> Call:
    """Return a line's request. Raises UsageError."""
    refuse_unknown(given, _PLAIN)
    given = {key: value for key, value in given.items() if value is not None}
    options = AnswerOptions.read({key: value for key, value in given.items() if key in OPTIONS})
    if ("prompt" in given) == ("messages" in given):
        raise UsageError("a line needs a prompt or messages, one of them")
    system = read(given, "system", Text())
    raw = read(given, "raw", Flag())
    if "messages" in given:
        if system is not None or raw:
            raise UsageError("system and raw go with a prompt, not with messages")
        messages = with_system(read_messages(given["messages"], strict=True), defaults.system)
    else:
        prompt = read_value(Text(), "prompt", given["prompt"])
        if not prompt.strip():
            raise UsageError("prompt must not be empty")
        if defaults.raw if raw is None else raw:
            if system is not None or options.thinking is not None or given.keys() & _TOOLS:
                raise UsageError("raw excludes a system message, thinking and tools")
            return Call(prompts=[prompt], options=options)
        messages = with_system([{"role": "user", "content": prompt}], defaults.system if system is None else system)
    return Call(messages=messages, options=options, **tool_fields(given))
