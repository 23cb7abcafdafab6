"""Session parameters: parsing, formatting and checks of text after /set. No widgets.

A parameter is an answer option (`app.answer.options`) with short values; names, ranges and help come from that table.
The settings screen, /set and /compare use this module.

Guard: tests/tui/test_parts.py.
"""

from collections.abc import Mapping

from msgspec import Struct

from headrace.app.answer.options import GRAMMARS, OPTIONS, AnswerOptions, ThinkingValue
from headrace.runtime.config.value_types import OneOf, Texts, parse_value
from headrace.runtime.errors import UsageError

_OTHERS = ("logit_bias", "chat_template_kwargs", *GRAMMARS)  # set by a flag, or by a command of their own
_ORDER = ("temperature", "top_p", "top_k", "min_p")  # the rest follows in the table's order


class Parameter(Struct, frozen=True):
    """A parameter of a session, by the name of its answer option.

    help: a noun phrase.
    range: the values that it takes, in words.
    """

    name: str
    help: str
    range: str


def _parameter(name: str) -> Parameter:
    row = OPTIONS[name]
    match row.kind:
        case ThinkingValue():
            return Parameter(name, row.help, f"auto, {row.kind}")
        case OneOf(names):
            return Parameter(name, row.help, " or ".join(names))
        case Texts():
            return Parameter(name, f"{row.help}; several: a | b", str(row.kind))
        case _:
            return Parameter(name, row.help, str(row.kind))


PARAMETERS = tuple(_parameter(name) for name in dict.fromkeys([*_ORDER, *OPTIONS]) if name not in _OTHERS)
_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def read_parameter(name: str, text: str) -> object:
    """Return a parameter's value; None for empty text or `default`. Raises UsageError."""
    parameter = _BY_NAME.get(name.replace("-", "_"))
    if parameter is None:
        raise UsageError(f"no parameter called {name!r}", "one of " + ", ".join(_BY_NAME))
    text = text.strip()
    kind = OPTIONS[parameter.name].kind
    if text in ("", "default"):
        return None
    if isinstance(kind, ThinkingValue) and text == "auto":
        return None
    try:
        value = parse_value(kind, text)
    except ValueError:
        raise UsageError(f"{parameter.name} must be {parameter.range}, not {text!r:.80}") from None
    # `read` checks the range, and `stored` returns the JSON value that a session keeps.
    return AnswerOptions.read({parameter.name: value}).stored()[parameter.name]


def read_system(text: str) -> str:
    """Return a system prompt as it is typed: `none` is no prompt."""
    if text == "none":
        return ""
    return text


def write_parameter(name: str, values: Mapping[str, object]) -> str:
    """Return a parameter's value as text, empty if it is not set."""
    value = values.get(name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):  # of `stop`
        return " | ".join(str(part).replace("\n", "\\n") for part in value)
    return f"{value}"
