"""Structured output: the forms in which clients ask for a schema, a regular expression or a choice, as answer options.

OpenAI's `response_format`, the Responses API's `text.format`, Anthropic's `output_config.format`, and vLLM's
`structured_outputs` and `guided_...` fields.
"""

import re
from collections.abc import Mapping

from headrace.app.answer.fields import Body, mapping
from headrace.app.answer.options import GRAMMARS
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError

_TYPES = "text, json_object or json_schema"
# vLLM's older fields, and the keys of `structured_outputs` that replaced them.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
# Keys of `structured_outputs`, and our options. A choice is turned into a regular expression.
_OPTIONS = {"json": "schema", "regex": "regex"}


def format_options(body: Body) -> dict[str, object]:
    """Return the options that a chat or completion asks for. Raises UsageError."""
    options = {} if body.get("response_format") is None else read_response_format(body["response_format"])
    if options and any(body.get(name) is not None for name in GRAMMARS):
        raise UsageError("response_format excludes schema, regex and grammar")
    wanted = {name: value for name, value in mapping(body, "structured_outputs").items() if value is not None}
    wanted |= {_GUIDED[name]: body[name] for name in _GUIDED if body.get(name) is not None}
    for name, value in wanted.items():
        if name == "choice":
            options["regex"] = _any_of(value)
        elif name in _OPTIONS:
            options[_OPTIONS[name]] = value
        else:
            raise UsageError(f"structured_outputs.{name} is not supported")
    return options


def read_response_format(value: object) -> dict[str, object]:
    """Return the options of a `response_format`: a `schema`, or none for text. Raises UsageError.

    A schema is always honoured wholly, whether it is said to be strict or not.
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
            raise UsageError("response_format of type json_schema needs json_schema with a schema")
        case {"type": kind}:
            raise UsageError(f"response_format must be of type {_TYPES}, not {shown(kind)}")
    raise UsageError(f"response_format must be an object with a type: {_TYPES}")


def flat_format(value: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a format with the schema beside its type: `text.format`, `output_config.format`."""
    if not value:
        return {}
    if value.get("type") == "json_schema":
        return read_response_format({"type": "json_schema", "json_schema": {"schema": value.get("schema")}})
    return read_response_format(dict(value))


def _any_of(value: object) -> str:
    """Return the regular expression of a choice of texts."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise UsageError(f"choice must be a list of texts, not {shown(value)}")
    return "|".join(re.escape(text) for text in value)
