"""Definitions of tools completed for chat templates that fail without fields that clients leave out.

The template alone sees the changed definitions; calls are checked against the client's own.

Guard: tests/models/text/test_adapt_messages.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.checkpoint.json_object import without_nulls

# Fields of a definition that lacks them, and a schema in place of one that allows any value.
_NO_PARAMETERS = {"type": "object", "properties": {}}
_DEFAULTS = {"description": "", "parameters": _NO_PARAMETERS}
_ANY = {"type": "string"}


def sent_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions without null in place of a description or parameters."""
    return [{**definition, "function": without_nulls(definition["function"])} for definition in definitions]


def complete_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions of which each has a description and parameters, at its end if the client sends none."""
    return [
        {**definition, "function": _with_defaults(definition["function"], _DEFAULTS)}
        for definition in sent_definitions(definitions)
    ]


def simple_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions whose parameters all have a description and one type, for templates that fail otherwise."""
    return [
        {
            **definition,
            "function": {
                **definition["function"],
                "parameters": _with_defaults(_simple(definition["function"]["parameters"]), _NO_PARAMETERS),
            },
        }
        for definition in complete_definitions(definitions)
    ]


def _with_defaults(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return values in their order, then the defaults of missing ones."""
    return dict(values) | {key: value for key, value in defaults.items() if key not in values}


def _simple(schema: Any) -> Any:
    """Return a schema in which each type is one name, and each property is an object with a description.

    Templates that take one type for each value cannot express "any value": such a value becomes a string.
    """
    if isinstance(schema, list):
        return [_simple(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    simple = {key: _simple(value) for key, value in schema.items()}
    if "type" in simple:
        if isinstance(simple["type"], list):
            kinds = simple["type"]
        else:
            kinds = [simple["type"]]
        # Hermes 2 Pro's template reads "null" as a list of types, letter by letter, and each letter again, without end.
        simple["type"] = next((kind for kind in kinds if kind != "null"), "string")
    if simple.get("type") == "array" and not isinstance(simple.get("items"), dict):
        simple["items"] = _ANY
    if simple.get("type") == "object" and simple.get("additionalProperties", True) is True:
        simple["additionalProperties"] = _ANY
    properties = simple.get("properties")
    if isinstance(properties, dict):
        simple["properties"] = {
            name: _with_defaults(each if isinstance(each, dict) else {}, {**_ANY, "description": ""})
            for name, each in properties.items()
            if each is not False  # no value fits
        }
    return simple
