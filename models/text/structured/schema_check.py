"""Checks of a JSON schema before it is compiled: its size, and keywords that llguidance would not honour wholly.

llguidance refuses the keywords that it does not implement. These checks add those that it loosens without a word, and
write dates and times as patterns: its own allow the 29th of February in any year, and a second 60 in any minute.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.runtime.errors import UsageError

MAX_BYTES = 256 << 10
MAX_DEPTH = 60  # levels of objects and lists
_EXACT = 2**53  # numbers beyond are rounded: llguidance reads them as doubles
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP})"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_VALUES = ("const", "enum", "default", "examples")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """Return a schema as JSON text. Raises UsageError for one that is too large or cannot be honoured wholly."""
    for depth, _, value in _walk(schema):
        if depth > MAX_DEPTH:
            raise UsageError(f"the schema is nested too deeply: more than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            _check_object(value)
    if schema is False:
        raise UsageError("schema: false allows no answer")
    try:
        text = json.dumps(_with_patterns(schema), ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError("the schema has a lone surrogate, which no text contains") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the schema is not JSON: {error}") from None
    if size > MAX_BYTES:
        raise UsageError(f"the schema is too large: {size} bytes, where one may have {MAX_BYTES}")
    return text


def _check_object(schema: Mapping[str, Any]) -> None:
    """Raise UsageError for a keyword that would be loosened."""
    if "x-guidance" in schema:
        raise UsageError("schema: x-guidance is not supported", "leave it out")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise UsageError(f"schema: $ref {reference!r:.80} is not within the schema", "put it under $defs")
    for keyword in _NUMBERS:
        for _, _, value in _walk(schema.get(keyword)):
            if isinstance(value, int | float) and abs(value) > _EXACT:
                raise UsageError(f"schema: {keyword} has a number beyond 2^53, which cannot be matched exactly")
    least, required = schema.get("minProperties"), schema.get("required")
    counted = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least - counted > 1 and schema.get("additionalProperties") is not False:
        # Keys that `properties` does not name may be repeated.
        raise UsageError(f"schema: minProperties {least} cannot be guaranteed", "name the properties, as required")


def _with_patterns(schema: Any) -> Any:
    """Return a schema with patterns in place of the formats of dates and times."""
    if isinstance(schema, list | tuple):
        return [_with_patterns(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    patterns: list[dict[str, str]] = []
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: _with_patterns(each) for name, each in value.items()}
        elif key == "format" and isinstance(value, str) and value in _FORMATS:
            patterns.append({"pattern": _FORMATS[value]})
        else:
            changed[key] = value if key in _VALUES else _with_patterns(value)
    return {**changed, "allOf": [*changed.get("allOf", ()), *patterns]} if patterns else changed


def _walk(value: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield every part of a JSON value: its depth, its key and itself."""
    waiting = [(0, "", value)]
    while waiting:
        depth, key, part = waiting.pop()
        yield depth, key, part
        if isinstance(part, Mapping):
            waiting += [(depth + 1, str(name), inner) for name, inner in part.items()]
        elif isinstance(part, list | tuple):
            waiting += [(depth + 1, "", inner) for inner in part]
