"""Tool calls, and the values of their arguments as JSON text.

All forms return these: `Reading` is their answer to `stream.ToolStream`, and `typed_value` decides which texts of a
tagged form are JSON.

Guard: tests/models/text/tools/test_forms.py.
"""

import ast
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from msgspec import Struct, field

from headrace.runtime.config.typed import as_list, as_mapping

PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
_LONGEST_LITERAL = 1 << 20  # characters


class ToolCall(Struct, frozen=True):
    """One call. arguments: JSON text of an object."""

    name: str
    arguments: str

    @classmethod
    def of(cls, name: str, arguments: object) -> "ToolCall":
        """Return a call. arguments: an object."""
        return cls(name, json.dumps(arguments, ensure_ascii=False))


class CallDelta(Struct, frozen=True):
    """Arguments that have come of a call that is not complete. index: among the calls of the answer.

    text: joined, those of one call are its arguments as JSON text, written as the model writes it.
    """

    index: int
    name: str
    text: str


class Tool(Struct, frozen=True):
    """A function that the model may call.

    parameters: a JSON schema of an object.
    strict: the schema has to be honoured.
    free: the arguments of a call may be any object.
    """

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False
    free: bool = False

    @property
    def schema(self) -> Mapping[str, object]:
        """Schema of a call's arguments: no other than the named ones, unless the parameters have it.

        A function without parameters takes none; `{"type": "object"}` alone is any object.
        """
        if self.free:
            return {"type": "object"}
        joined = self.parameters.keys() & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
        names_parameters = not self.parameters or "properties" in self.parameters
        if not names_parameters or joined:
            return {"type": "object", **self.parameters}
        return {"type": "object", "additionalProperties": False, **self.parameters}

    @property
    def properties(self) -> Mapping[str, object]:
        """Schemas of the parameters, by name."""
        return as_mapping(self.parameters.get("properties"))

    @property
    def required(self) -> Sequence[str]:
        """Parameters that a call has to have."""
        return as_list(self.parameters.get("required"))

    def needs(self, parameter: str) -> bool:
        """Return whether a call has to have a parameter."""
        return parameter in self.required

    def schema_of(self, parameter: str) -> dict[str, object]:
        """Return a parameter's schema, with the definitions that it may refer to."""
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        return {**as_mapping(self.properties.get(parameter)), **shared}

    def kinds(self, parameter: str) -> frozenset[str]:
        """Return the types that a parameter's value may have; all of them if its schema tells none."""
        return kinds_of(self.properties.get(parameter), self.parameters)


KINDS = frozenset(["string", "number", "boolean", "null", "array", "object"])
"""Types of JSON values. An integer is a number."""
_MAX_REFERENCES = 20  # from schema to schema


def kinds_of(schema: object, document: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """Return the types that a value of a schema may have, all if it tells none.

    document: the schema that references point into.
    depth: of references and choices so far.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return KINDS

    # Every keyword of the schema narrows the types.
    kinds = KINDS
    names = schema.get("type")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list):
        kinds &= {"number" if name == "integer" else name for name in names}
    values = choices_of(schema)
    if values is not None:
        kinds &= set(map(kind_of, values))
    for key in ("anyOf", "oneOf"):  # a value has the type of one of the choices
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            kinds &= frozenset[str]().union(*(kinds_of(choice, document, depth + 1) for choice in choices))
    for part in as_list(schema.get("allOf")):
        kinds &= kinds_of(part, document, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        kinds &= kinds_of(referenced(reference, document), document, depth + 1)

    # Without any of these, the type is that which has properties, or items.
    if kinds == KINDS and "properties" in schema:
        return frozenset(["object"])
    if kinds == KINDS and "items" in schema:
        return frozenset(["array"])
    return kinds or KINDS  # keywords that exclude each other tell nothing


def choices_of(schema: Mapping[str, object]) -> list[Any] | None:
    """Return the only values that a schema allows, by `const` or `enum`; None if it names none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    if isinstance(values, list):
        return values
    return None


def referenced(reference: str, document: Mapping[str, object]) -> object:
    """Return the schema that a reference names; None if the document has none there."""
    schema: object = document
    for key in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(schema, Mapping):
            return None
        schema = schema.get(key.replace("~1", "/").replace("~0", "~"))
    return schema


def part_of(schema: object, name: str | None, document: Mapping[str, object], depth: int = 0) -> object:
    """Return the schema of a property, or of a list's items if `name` is None; None if the schema tells nothing.

    document: the schema that references point into.
    depth: of references and choices so far.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return part_of(referenced(reference, document), name, document, depth + 1)
    properties = schema.get("properties")
    if name is None:
        part = schema.get("items")
    elif isinstance(properties, Mapping) and name in properties:
        part = properties[name]
    else:
        part = schema.get("additionalProperties")
    if isinstance(part, Mapping):
        return part
    # Otherwise the part in the first schema of these lists that has one.
    choices = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    parts = (part_of(each, name, document, depth + 1) for each in choices)
    return next((part for part in parts if part is not None), None)


def kind_of(value: object) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


class Reading(Struct, frozen=True):
    """The beginning of a text as calls: `length` characters of it. Without calls they are text."""

    length: int
    calls: tuple[ToolCall, ...] = ()


def no_call(length: int, *, final: bool) -> Reading | None:
    """Return the first `length` characters as text. None unless `final`: more text may make them a call."""
    if final:
        return Reading(length)
    return None


def write_json_calls(calls: Sequence[Mapping[str, object]]) -> str:
    """Return calls {"name": ..., "arguments": {...}} as JSON objects, one a line."""
    written = ({"name": call["name"], "arguments": call["arguments"]} for call in calls)
    return "\n".join(json.dumps(call, ensure_ascii=False) for call in written)


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
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(given, Mapping):
        return None
    return ToolCall.of(name, given)


def calls_of(value: object) -> tuple[ToolCall, ...]:
    """Return the calls of a JSON object or a list of them; none if one of them is no call."""
    if not isinstance(value, list):
        value = [value]
    calls: list[ToolCall] = []
    for each in value:
        call = call_of(each)
        if call is None:
            return ()
        calls.append(call)
    return tuple(calls)


def may_be_text(tool: Tool | None, parameter: str) -> bool:
    """Return whether a text may be the value of a parameter; True for one without a schema."""
    return tool is None or parameter not in tool.properties or "string" in tool.kinds(parameter)


def typed_value(tool: Tool | None, parameter: str, text: str) -> object:
    """Return the value of a parameter that is written as plain text.

    It is JSON, or a literal of Python's, if the schema allows a value of that type there; else it is the text itself.
    """
    if tool is None or parameter not in tool.properties:
        return typed_text(KINDS, text)
    return typed_text(tool.kinds(parameter), text)


def typed_text(kinds: Set[str], text: str) -> object:
    """Return the value of one of some types that is written as plain text. See `typed_value`."""
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if "null" in kinds and kinds != KINDS and text.strip() == "None":
            return None  # templates without `tojson` print null so, also where a text is allowed
        if "string" in kinds:
            return text
        value = _python_value(text)
    if kind_of(value) not in kinds:
        return text
    return value


def _python_value(text: str) -> object:
    """Return the value of True, False, None, or of a list or an object as Python writes it; else the text itself.

    Templates that print arguments without `tojson` write these.
    """
    plain = text.strip()
    if plain in PYTHON_CONSTANTS:
        return PYTHON_CONSTANTS[plain]
    if plain[:1] not in ("[", "{") or len(plain) > _LONGEST_LITERAL:
        return text
    try:
        value = ast.literal_eval(plain)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return text
    if not isinstance(value, list | dict):
        return text
    return value
