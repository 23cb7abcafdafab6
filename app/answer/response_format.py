"""Structured output: the forms in which clients ask for a schema, a regular expression or a choice, as answer options.

OpenAI's `response_format`, the Responses API's `text.format`, Anthropic's `output_config.format`, and vLLM's
`structured_outputs`.

`openai_form.py` takes the options from `format_options`; `responses.py` and `anthropic.py` of the server take them from
`flat_format`. Guards: tests/app/answer/test_structured.py, and test_openai.py, test_responses.py and test_anthropic.py
in tests/app/server.
"""

import re
from collections.abc import Mapping

from headrace.app.answer.fields import Body, mapping
from headrace.app.answer.options import GRAMMARS
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError

_TYPES = "text, json_object or json_schema"
# Keys of `structured_outputs`, and our options. A choice is turned into a regular expression.
_OPTIONS = {"json": "schema", "regex": "regex"}


def format_options(body: Body) -> dict[str, object]:
    """Return the options that a chat or completion asks for in one of these forms.

    Raises UsageError, also if two fields ask: an answer keeps to one form.
    """
    asked = _options_by_field(body)
    by_name = [name for name in GRAMMARS if body.get(name) is not None]  # `AnswerOptions` reads these, and refuses two
    if asked and len(asked) + len(by_name) > 1:
        first, second, *_ = [*asked, *by_name]
        raise UsageError(f"{first} excludes {second}", "give one of them")
    return next(iter(asked.values()), {})


def _options_by_field(body: Body) -> dict[str, dict[str, object]]:
    """Return the options that each field asks for, without fields that ask for none."""
    asked: dict[str, dict[str, object]] = {}
    response_format = body.get("response_format")
    if response_format is not None:
        options = read_response_format(response_format)
        if options:  # none for text
            asked["response_format"] = options
    for key, value in mapping(body, "structured_outputs").items():
        if value is not None:
            asked[f"structured_outputs.{key}"] = _structured(key, value)
    return asked


def _structured(key: str, value: object) -> dict[str, object]:
    """Return the option of a key of `structured_outputs`."""
    if key == "choice":
        return {"regex": _any_of(value)}
    if key not in _OPTIONS:
        raise UsageError(f"structured_outputs.{key} is not supported")
    return {_OPTIONS[key]: value}


def read_response_format(value: object, name: str = "response_format") -> dict[str, object]:
    """Return the options of a `response_format`: a `schema`, or none for text. Raises UsageError.

    A schema is always honoured wholly, whether it is said to be strict or not.

    name: the field's name, for errors.
    """
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object", "schema": Mapping() as schema}:  # as llama.cpp's clients send it
            return {"schema": schema}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"schema": schema}
        case {"type": "json_schema"}:
            raise UsageError(f"{name} of type json_schema needs json_schema with a schema")
        case {"type": kind}:
            raise UsageError(f"{name} must be of type {_TYPES}, not {shown(kind)}")
    raise UsageError(f"{name} must be an object with a type: {_TYPES}")


def flat_format(value: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the options of a format with the schema beside its type. Raises UsageError.

    name: the field's name, for errors, such as `text.format`.
    """
    if not value:
        return {}
    if value.get("type") != "json_schema":
        return read_response_format(value, name)
    if not isinstance(value.get("schema"), Mapping):
        raise UsageError(f"{name} of type json_schema needs a schema")
    return {"schema": value["schema"]}


def _any_of(value: object) -> str:
    """Return the regular expression of a choice of texts."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise UsageError(f"choice must be a list of texts, not {shown(value)}")
    return "|".join(re.escape(text) for text in value)
