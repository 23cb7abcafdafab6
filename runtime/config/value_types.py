"""Value types of options and settings: numbers in a range, choices, flags, texts and logit biases.

`read` returns the value of a JSON or TOML document, or raises ValueError with the words that follow "must be".

A field of `SamplingParams`, `AnswerOptions` or the settings has one of these as its kind, and every interface reads it
by `read_value` (documents) or `parse_value` (text). A new type is a class with `read`, and `__str__` for the range. If
its `read` takes no text, it needs a case in `parse_value`; its flag of the command line needs one in
`app/cli/answer_options.py`.

Guard: tests/app/answer/test_options.py.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Protocol, TypeVar, get_type_hints

from msgspec import Struct

from headrace.runtime.errors import UsageError

Read = TypeVar("Read", covariant=True)
_BIAS = "an object of token ids and numbers"
_SHOWN = 60  # characters of a refused value in an error, which is one line
_NO_LIMIT = 2**31 - 1  # tokens: beyond any context


class Number(Struct, frozen=True):
    """A number from `minimum` to `maximum`; nan is in no range. above: `minimum` itself is excluded."""

    minimum: float = 0
    maximum: float = math.inf
    above: bool = False

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError("a number")
        try:
            number = float(value)
        except OverflowError:
            raise ValueError("a smaller number") from None
        in_range = self.minimum <= number <= self.maximum  # false for nan
        if not in_range or (self.above and number == self.minimum):
            raise ValueError(str(self))
        return number

    def __str__(self) -> str:
        least = _figure(self.minimum)
        maximum = _figure(self.maximum)
        if self.maximum == math.inf:
            return f"above {least}" if self.above else f"{least} or more"
        if self.above:
            return f"above {least} and at most {maximum}"
        return f"from {least} to {maximum}"


def _figure(number: float) -> str:
    """Return a bound of a range, powers of ten from 10,000 on and from 0.0001 down in short: `10^6`, `10^-6`."""
    exponent = math.log10(abs(number)) if number else 0.0
    if abs(exponent) < 4 or not exponent.is_integer():
        return f"{number:.10g}"
    sign = "-" if number < 0 else ""
    return f"{sign}10^{exponent:.0f}"


class Whole(Struct, frozen=True):
    """A whole number in a range."""

    minimum: int = 0
    maximum: int | None = None

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError("a whole number")
        number = int(value)
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
            raise ValueError(str(self))
        return number

    def __str__(self) -> str:
        if self.maximum is None:
            return f"{self.minimum} or more"
        maximum = "2^64 - 1" if self.maximum == 2**64 - 1 else self.maximum
        return f"from {self.minimum} to {maximum}"


class TokenLimit(Whole, frozen=True):
    """A number of tokens, at least 1; -1, as llama.cpp and others write it: no limit but the context's.

    It is a `Whole` so that text is read as one; the range of that is not used.
    """

    def read(self, value: object) -> int:
        if value == -1 and not isinstance(value, bool):
            return _NO_LIMIT
        return Whole(1).read(value)

    def __str__(self) -> str:
        return "1 or more, or -1: no limit"


class OneOf(Struct, frozen=True):
    """One of several names."""

    names: tuple[str, ...]

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(str(self))
        return value

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


class Flag(Struct, frozen=True):
    """True or false."""

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value

    def __str__(self) -> str:
        return "on or off"


class Text(Struct, frozen=True):
    """Any text."""

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(str(self))
        return value

    def __str__(self) -> str:
        return "a text"


class TextFile(Text, frozen=True):
    """Any text; on the command line, a file that has it."""


class JSONSchema(Struct, frozen=True):
    """A JSON schema, also as JSON text. `object` is the schema of any JSON object."""

    def read(self, value: object) -> Mapping[str, object] | bool:
        if value == "object":
            return {"type": "object"}
        schema = _parsed(value)
        if not isinstance(schema, Mapping | bool):
            raise ValueError(str(self))
        return schema

    def __str__(self) -> str:
        return "a JSON schema or `object`"


class JSONObject(Struct, frozen=True):
    """A JSON object, also as JSON text."""

    def read(self, value: object) -> Mapping[str, object]:
        parsed = _parsed(value)
        if not isinstance(parsed, Mapping):
            raise ValueError(str(self))
        return parsed

    def __str__(self) -> str:
        return "a JSON object"


def _parsed(value: object) -> object:
    """Return the value of JSON text, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("JSON") from None


class Texts(Struct, frozen=True):
    """Texts that are not empty; a single one may stand for a list."""

    def read(self, value: object) -> tuple[str, ...]:
        texts = value
        if isinstance(value, str):
            texts = (value,)
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a text or a list of texts")
        if not all(texts):
            raise ValueError("texts that are not empty")
        return tuple(texts)

    def __str__(self) -> str:
        return "not empty"


class LogitBias(Struct, frozen=True):
    """Token ids and the numbers added to their logits."""

    def read(self, value: object) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise ValueError(_BIAS)
        return {self._token(token): self._added(added) for token, added in value.items()}

    def _token(self, token: object) -> int:
        # JSON's keys are texts. Ten digits are beyond any vocabulary; the sampler refuses ids outside the model's.
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
            return int(token)
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(_BIAS)
        return int(token)

    def _added(self, added: object) -> float:
        try:
            return Number(-math.inf).read(added)
        except ValueError:
            raise ValueError(_BIAS) from None


class ValueType(Protocol[Read]):
    """A type of values. Its text describes the range."""

    def read(self, value: object) -> Read: ...


def annotations_of(record: type[Struct]) -> dict[str, Any]:
    """Return what the type of each field carries, `Annotated[type, kind]`, by the field's name."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def read_value(kind: ValueType[Read], name: str, value: object) -> Read:
    """Return a value of a document. name: for the error. Raises UsageError."""
    try:
        return kind.read(value)
    except ValueError as error:
        raise UsageError(f"{name} must be {error}, not {shown(value)}") from None


def parse_value(kind: ValueType[object], text: str) -> object:
    """Return a typed value: `on` or `off` for a flag, texts with ` | ` between and \\n for a line break.

    Raises ValueError, with a message of `read` or of Python's: callers name the range instead.
    """
    match kind:
        case Number():
            return kind.read(float(text))
        case Whole():
            return kind.read(int(text))
        case Flag():
            return kind.read({"on": True, "off": False}.get(text))
        case Texts():
            return kind.read([part.replace("\\n", "\n") for part in text.split(" | ") if part])
        case _:
            return kind.read(text)


def shown(value: object) -> str:
    """Return a refused value for an error message: one short line, without Python's `None` and `True`."""
    text = repr(value)
    if value is None or isinstance(value, bool | list | dict):
        with suppress(TypeError, ValueError, RecursionError):  # not a JSON value
            text = json.dumps(value)
    if len(text) > _SHOWN:
        return f"{text[: _SHOWN - 1]}…"
    return text
