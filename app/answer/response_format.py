"""OpenAI's `response_format` as an answer option."""

from collections.abc import Mapping

from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError

_TYPES = "text, json_object or json_schema"


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
