"""Tool calls, and the values of their arguments as JSON text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Arguments that have come of a call that is not complete. index: among the calls of the answer.

    text: joined, those of one call are its arguments as JSON text, written as the model writes it.
    """

    index: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of an object. strict: it has to be honoured.

    free: the arguments of a call may be any object.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    free: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of a call's arguments: no other than the named ones, unless the parameters have it."""
        if self.free:
            return {"type": "object"}
        joined = self.parameters.keys() & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
        closed = {"additionalProperties": False} if self.properties and not joined else {}
        return {"type": "object", **closed, **self.parameters}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters, by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    def needs(self, parameter: str) -> bool:
        """Return whether a call has to have a parameter."""
        required = self.parameters.get("required")
        return isinstance(required, list) and parameter in required

    def schema_of(self, parameter: str) -> dict[str, Any]:
        """Return a parameter's schema, with the definitions that it may refer to."""
        schema = self.properties.get(parameter)
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        return {**(schema if isinstance(schema, Mapping) else {}), **shared}

    def is_text(self, parameter: str) -> bool:
        """Return whether a parameter is a text, or is not described."""
        schema = self.properties.get(parameter)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        return kind == "string" or (kind is None and not isinstance(schema, Mapping))


@dataclass(frozen=True, slots=True)
class Reading:
    """The beginning of a text as calls: `length` characters of it. Without calls they are text."""

    length: int
    calls: tuple[ToolCall, ...] = ()


def call_of(value: object) -> ToolCall | None:
    """Return the call of a JSON object with `name` and arguments; None for any other value."""
    if not isinstance(value, Mapping):
        return None
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = value.get("name")
    given: object = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(given, Mapping):
        return None
    return ToolCall(name, json.dumps(given, ensure_ascii=False))


def calls_of(value: object) -> tuple[ToolCall, ...]:
    """Return the calls of a JSON object or a list of them; none if one of them is no call."""
    calls = [call_of(each) for each in (value if isinstance(value, list) else [value])]
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def typed_value(tool: Tool | None, parameter: str, text: str) -> Any:
    """Return the value of a parameter that is written as plain text: JSON unless the schema has a text there."""
    if tool is not None and tool.is_text(parameter) and parameter in tool.properties:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
