"""Fields of JSON bodies: typed reading, and refusal by name of fields that would change an answer."""

from collections.abc import Collection, Mapping
from typing import Any

from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.answer.value_types import Flag, OneOf, Text, ValueType, Whole, read_value, shown
from headrace.app.server.errors import refused

Body = Mapping[str, Any]
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_CHOICES = 16


def read(body: Body, name: str, kind: ValueType, default: Any = None) -> Any:
    """Return a field, or `default` if it is missing or null. Raises UsageError."""
    value = body.get(name)
    return default if value is None else read_value(kind, name, value)


def flag(body: Body, name: str) -> bool:
    """Return a field that is true or false; false if it is missing."""
    found: bool = read(body, name, Flag(), False)
    return found


def text(body: Body, name: str, default: str | None = None) -> str | None:
    """Return a text."""
    found: str | None = read(body, name, Text(), default)
    return found


def whole(body: Body, name: str, least: int, most: int | None, default: int | None = None) -> int | None:
    """Return a whole number in a range."""
    found: int | None = read(body, name, Whole(least, most), default)
    return found


def choice(body: Body, name: str, names: tuple[str, ...]) -> str | None:
    """Return one of several names."""
    found: str | None = read(body, name, OneOf(names))
    return found


def mapping(body: Body, name: str) -> Body:
    """Return an object, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(f"{name} must be an object, not {shown(value)}", name)
    return value


def items(body: Body, name: str, most: int) -> list[Any]:
    """Return a list, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise refused(f"{name} must be a list, not {shown(value)}", name)
    if len(value) > most:
        raise refused(f"{name} has {len(value)} entries, at most {most} are allowed", name)
    return value


def refuse(body: Body, names: Collection[str]) -> None:
    """Refuse fields that would change the answer and are not supported, unless they are empty, 0 or false."""
    for name in body:
        if name in names and body[name]:
            raise refused(f"{name} is not supported", name)


def answer_options(
    body: Body, renamed: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> AnswerOptions:
    """Return the answer options among the fields. renamed: other names of options. more: options from other fields.

    -1 as a seed or a number of tokens means unset. Raises UsageError for a value out of range.
    """
    names = {name: name for name in OPTIONS} | dict(renamed or {})
    values: dict[str, Any] = {}
    for field, option in names.items():
        value = body.get(field)
        if value is None or (option in ("seed", "max_tokens") and type(value) is int and value == -1):
            continue
        if option in values:
            raise refused(f"{field} and {option} mean the same: give one of them", field)
        values[option] = read_value(OPTIONS[option].kind, field, value)
    if len(values.get("stop", ())) > MAX_STOPS:
        raise refused(f"stop has {len(values['stop'])} texts, at most {MAX_STOPS} are allowed", "stop")
    if len(values.get("logit_bias", ())) > MAX_BIASES:
        raise refused(f"logit_bias has more than {MAX_BIASES} tokens", "logit_bias")
    return AnswerOptions(**(values | dict(more or {})))
