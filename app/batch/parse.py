"""Lines of a batch, read as requests, or as errors.

    {"prompt": "Why?", "system": "Be brief.", "temperature": 0.7}     as for `headrace run`
    {"messages": [{"role": "user", "content": "Why?"}], "id": "q1"}

and the OpenAI batch form, whose shapes are those of the API reference of OpenAI, section Batch:

    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

A line's options go before the defaults of all lines. A request's `digest` depends on everything that decides its
answer and the form of its result, so that a result found in an output is never taken for another request's. A new
field of `Call` that changes either has to be in `_identity`; a change of its value for old lines makes every batch
start anew.

Guards: tests/app/batch/test_parse.py and test_output.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.app.answer.call import Call
from headrace.app.answer.fields import object_named, read
from headrace.app.answer.messages import read_messages
from headrace.app.answer.openai_form import CHAT_FIELDS, COMPLETION_FIELDS, read_chat, read_completion
from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.answer.tools import tool_fields
from headrace.app.config.bounded_input import DOCUMENT, json_object, read_bounded, without_mark
from headrace.runtime.config.value_types import Flag, OneOf, Text, read_value, shown
from headrace.runtime.errors import HeadraceError, UsageError

STDIN = "-"
_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_PLAIN_KEYS = frozenset({*OPTIONS, *_TOOLS, "id", "prompt", "messages", "system", "raw"})

Form = Literal["plain", "chat.completion", "text_completion"]
"""Form of a line, and of its result."""
Conversation = Sequence[Mapping[str, object]]


class BatchDefaults(Struct, frozen=True):
    """Defaults of all lines.

    options: of the command and the settings file, where a line does not set them.
    written: options from the settings file with their numbers as written there, for digests: in JSON, 1 is not 1.0.
    recommended: the catalog's sampling, for digests; that of the model's files is part of `identity`.
    system: system prompt of conversations without one.
    raw: a prompt is continued as it is, without a chat template.
    model: the model that answers.
    names: names that a line's `model` may have; None: any.
    identity: whatever else decides an answer (the model's files, the context limit), as part of every digest.
    """

    options: AnswerOptions = field(default_factory=AnswerOptions)
    written: Mapping[str, object] = field(default_factory=dict)
    recommended: Mapping[str, float] = field(default_factory=dict)
    system: str = ""
    raw: bool = False
    model: str = ""
    names: frozenset[str] | None = None
    identity: str = ""


class BatchLine(Struct, frozen=True):
    """A request.

    number: of the line, from 1.
    name: its own `id` or `custom_id`; None without.
    form: of the line, and of its result.
    call: the request as it is written.
    options: those of the line over the defaults of all lines.
    digest: of everything that decides its answer (`parse._identity`).
    """

    number: int
    name: str | int | None
    form: Form
    call: Call
    options: AnswerOptions
    digest: str

    @property
    def prompt(self) -> Sequence[Mapping[str, object]] | str:
        """A conversation, or a text to continue as it is."""
        if self.call.prompts:
            return self.call.prompts[0]
        return self.call.messages


class BadLine(Struct, frozen=True):
    """A line without a valid request; `error` says why. Fields as of `BatchLine`; digest: of the line itself."""

    number: int
    name: str | int | None
    form: Form
    error: HeadraceError
    digest: str


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
            form = _form_of(given)
            if name is None:
                raise UsageError("a request in the OpenAI batch form needs a custom_id")
            call = _read_body(given, form, defaults)
        else:
            name = _name(given, "id")
            call = _read_plain(given, defaults)
    except HeadraceError as error:
        return _bad(raw, number, name, form, error)
    options = call.options.over(defaults.options)
    called = {"line": number} if name is None else {"name": name}
    return BatchLine(number, name, form, call, options, _digest(_identity(call, form, called, defaults)))


def _read_plain(given: Mapping[str, object], defaults: BatchDefaults) -> Call:
    """Return the request of a line in headrace's own form. Raises UsageError."""
    _refuse_unknown(given, _PLAIN_KEYS)
    given = {key: value for key, value in given.items() if value is not None}
    options = AnswerOptions.read({key: value for key, value in given.items() if key in OPTIONS})
    if ("prompt" in given) == ("messages" in given):
        raise UsageError("a line needs a prompt or messages, one of them")
    system = read(given, "system", Text())
    raw = read(given, "raw", Flag())
    if "messages" in given:
        if system is not None or raw:
            raise UsageError("system and raw go with a prompt, not with messages")
        messages = _with_system(read_messages(given["messages"], strict=True), defaults.system)
    else:
        prompt = read_value(Text(), "prompt", given["prompt"])
        if not prompt.strip():
            raise UsageError("prompt must not be empty")
        if defaults.raw if raw is None else raw:
            if system is not None or options.thinking is not None or given.keys() & _TOOLS:
                raise UsageError("raw excludes a system message, thinking and tools")
            return Call(prompts=[prompt], options=options)
        messages = _with_system([{"role": "user", "content": prompt}], defaults.system if system is None else system)
    return Call(messages=messages, options=options, **tool_fields(given))


# -- the OpenAI batch form ---------------------------------------------------------------------------------------------

_OPENAI_KEYS = frozenset({"custom_id", "method", "url", "body"})
_URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_FIELDS: Mapping[Form, frozenset[str]] = {"chat.completion": CHAT_FIELDS, "text_completion": COMPLETION_FIELDS}
# Fields of the server alone.
_NOT_HERE = frozenset(
    {
        "continue_final_message",  # every answer of a batch begins anew
        "suffix",  # the text after an answer: a batch fills no gaps
        "headrace",  # figures of the answer in the server's form
    }
)
# The field that each form must have.
_CONTENT: Mapping[Form, str] = {"chat.completion": "messages", "text_completion": "prompt"}
# Fields that may only have the value of the default behaviour.
_FIXED: Mapping[str, object] = {"n": 1, "best_of": 1, "stream": False, "echo": False}
# Fields that change no answer: labels, caches and billing of OpenAI's service, and hints.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "prediction",
})  # fmt: skip


def _form_of(given: Mapping[str, object]) -> Form:
    """Return the API call of a line, by its url, else by its body. Raises UsageError."""
    url = given.get("url")
    if url is None:
        body = given.get("body")
        if isinstance(body, dict) and "prompt" in body:
            return "text_completion"
        return "chat.completion"
    return _URLS[read_value(OneOf(tuple(_URLS)), "url", url)]


def _read_body(given: Mapping[str, object], form: Form, defaults: BatchDefaults) -> Call:
    """Return the request of a line in the OpenAI batch form.

    Unknown fields are refused, and so is more than one answer: an error before hours of work. Raises UsageError.
    """
    _refuse_unknown(given, _OPENAI_KEYS)
    if given.get("method", "POST") != "POST":
        raise UsageError(f"method must be POST, not {shown(given['method'])}")
    body = {key: value for key, value in object_named("body", given.get("body")).items() if value is not None}
    _refuse_unknown(body, (_FIELDS[form] - _NOT_HERE) | _IGNORED, " in body")
    for key, value in _FIXED.items():
        if key in body and (body[key] != value or type(body[key]) is not type(value)):  # True is equal to 1
            raise UsageError(f"{key} can only be {shown(value)}, not {shown(body[key])}")
    if _CONTENT[form] not in body:
        raise UsageError(f"a body for this url needs {_CONTENT[form]}")
    if form == "chat.completion":
        call = read_chat(body, strict=True)
        call = replace(call, messages=_with_system(call.messages, defaults.system))
    else:
        call = read_completion(body)
        if len(call.prompts) > 1:
            raise UsageError("prompt can only be one text")
    if call.model is not None and defaults.names is not None and call.model not in defaults.names:
        raise UsageError(
            f"the line asks for model {shown(call.model)}, but {defaults.model} answers",
            "-m MODEL has that model answer every line, whatever model they name",
        )
    return call


# -- both forms --------------------------------------------------------------------------------------------------------


def _refuse_unknown(given: Mapping[str, object], known: frozenset[str], where: str = "") -> None:
    """Raise UsageError that names the first unknown key. where: said after the key."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def _with_system(messages: Conversation, system: str) -> Conversation:
    """Return a conversation with `system` before it, unless that is empty or it begins with a system message."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


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
