"""Parsed JSON and TOML as typed objects, with errors in our words.

    typed(Hostfile, document)     # ValueError: hosts[1].ips must be a list, not a text

Types are msgspec's structs and standard annotations; `msgspec.Meta` has ranges.

Documents from outside are read this way, such as hostfiles and stored records. Errors are translated by matching
msgspec's messages, so its version is pinned and tests/runtime/config/test_typed.py has each kind (docs/workarounds.md).
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

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
_KEY = re.compile(r"Object (missing required|contains unknown) field `(.*)`")  # Object missing required field `ips`
_TYPE = re.compile(r"Expected `([\w |]+)`, got `(\w+)`")  # Expected `int | null`, got `str`
_RANGE = re.compile(r"Expected `\w+` (>=?|<=?) (\S+)")  # Expected `int` >= 1


def typed(kind: type[T], value: object) -> T:
    """Return a parsed document as `kind`. Raises ValueError that names the first wrong field by its path."""
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
    """Return the error for a message of msgspec, such as "Expected `array`, got `str` - at `$.hosts[1].ips`"."""
    text, _, path = complaint.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    subject = path or "the document"
    if match := _KEY.fullmatch(text):
        problem, key = match.groups()
        if problem == "contains unknown":
            return f"{subject} has the unknown key {key:.60}"
        return f"{path}.{key} is missing".removeprefix(".")
    if match := _TYPE.fullmatch(text):
        wanted, given = match.groups()
        return f"{subject} must be {_nouns(wanted)}, not {_nouns(given)}"
    if match := _RANGE.fullmatch(text):
        relation, bound = match.groups()
        return f"{subject} must be {_RELATIONS[relation].format(_plain(bound))}"
    return f"{subject} has no usable value"


def _plain(number: str) -> str:
    """Return a bound as people write it: `1` for `1.0`."""
    return number.removesuffix(".0")


def _nouns(types: str) -> str:
    """Return types in words: `int | null` -> "a whole number or null"."""
    return " or ".join(_NOUNS.get(name, name) for name in types.split(" | "))
