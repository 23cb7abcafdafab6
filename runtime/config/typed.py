"""Parsed JSON and TOML as typed objects, with errors in our words.

    typed(Hostfile, document)     # ValueError: hosts[1].ips must be a list, not a text

Types are msgspec's structs, dataclasses and standard annotations; `msgspec.Meta` has ranges.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_NOUNS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_RELATIONS = {">": "above {}", ">=": "{} or more", "<": "below {}", "<=": "at most {}"}
# msgspec's own words (0.22), which pyproject.toml pins.
_KEY = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
_TYPE = re.compile(r"Expected `([\w |]+)`, got `(\w+)`")
_RANGE = re.compile(r"Expected `\w+` (>=?|<=?) (\S+)")


def typed(kind: type[T], value: object) -> T:
    """Return a parsed document as `kind`. Raises ValueError that names the first wrong field by its path."""
    import msgspec  # late: the chat's first frame reads no document

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_in_our_words(str(error))) from None
    except UnicodeEncodeError:  # of a text in place of a number, which msgspec means to quote
        raise ValueError("half a surrogate pair is no text") from None


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a value of parsed JSON if it is an object; else an empty one."""
    if not isinstance(value, Mapping):
        return {}
    return value


def as_list(value: object) -> list[Any]:
    """Return a value of parsed JSON if it is a list; else an empty one."""
    if not isinstance(value, list):
        return []
    return value


def _in_our_words(complaint: str) -> str:
    text, _, path = complaint.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    subject = path or "the document"
    if key := _KEY.fullmatch(text):
        if key[1] == "contains unknown":
            return f"{subject} has the unknown key {key[2]:.60}"
        return f"{path}.{key[2]} is missing".removeprefix(".")
    if types := _TYPE.fullmatch(text):
        return f"{subject} must be {_nouns(types[1])}, not {_nouns(types[2])}"
    if limit := _RANGE.fullmatch(text):
        return f"{subject} must be {_RELATIONS[limit[1]].format(_plain(limit[2]))}"
    return f"{subject} has no usable value"


def _plain(number: str) -> str:
    return number.removesuffix(".0")


def _nouns(types: str) -> str:
    return " or ".join(_NOUNS.get(name, name) for name in types.split(" | "))
