"""Checks of a JSON schema before it is compiled: its size, and keywords that llguidance would not honour wholly.

llguidance refuses the keywords that it does not implement. These checks add those that it loosens without a word.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.runtime.errors import UsageError

MAX_BYTES = 256 << 10
MAX_DEPTH = 60  # levels of objects and lists
_EXACT = 2**53  # numbers beyond are rounded: llguidance reads them as doubles
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
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
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
