"""Structured output: the forms in which clients ask for a schema, a regular expression or a choice, as answer options.

OpenAI's `response_format`, the Responses API's `text.format`, Anthropic's `output_config.format`, and vLLM's
`structured_outputs` and `guided_...` fields.
"""

import re
from collections.abc import Mapping

from headrace.app.answer.response_format import read_response_format
from headrace.app.server.errors import refused
from headrace.app.server.fields import Body, mapping
from headrace.runtime.config.value_types import shown

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
_OPTIONS = {"json": "schema", "regex": "regex"}


def format_options(body: Body) -> dict[str, object]:
    """Return the options that a chat or completion asks for. Raises ApiError and UsageError."""
    options = {} if body.get("response_format") is None else read_response_format(body["response_format"])
    wanted = {name: value for name, value in mapping(body, "structured_outputs").items() if value is not None}
    wanted |= {_GUIDED[name]: body[name] for name in _GUIDED if body.get(name) is not None}
    for name, value in wanted.items():
        if name == "choice":
            options["regex"] = _any_of(value)
        elif name in _OPTIONS:
            options[_OPTIONS[name]] = value
        else:
            raise refused(f"structured_outputs.{name} is not supported", "structured_outputs")
    return options


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
        raise refused(f"choice must be a list of texts, not {shown(value)}", "structured_outputs")
    return "|".join(re.escape(text) for text in value)
