"""The parameters a session can have: how each is written, read and checked. Knows no widget.

The same ranges as `runtime.sampling`, which cannot be imported here: it brings mlx.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Parameter:
    """`read` turns text into a value; `holds` says whether the value is in range, `range` says it in words."""

    name: str
    help: str
    read: Callable[[str], Any]
    holds: Callable[[Any], bool]
    range: str


def _whole(text: str) -> int:
    return int(text)


def _texts(text: str) -> list[str]:
    """Several stop texts are separated by ` | `; \\n stands for a line break."""
    return [part.replace("\\n", "\n") for part in text.split(" | ") if part]


def _switch(text: str) -> bool | None:
    try:
        return {"on": True, "off": False, "auto": None}[text]
    except KeyError:
        raise ValueError(text) from None


PARAMETERS = (
    Parameter("temperature", "0 is greedy", float, lambda v: 0 <= v < 100, "0 or more"),
    Parameter("top_p", "fewest tokens with this much probability", float, lambda v: 0 < v <= 1, "above 0, at most 1"),
    Parameter("top_k", "only the k most likely; 0 is off", _whole, lambda v: v >= 0, "0 or more"),
    Parameter("min_p", "drop tokens below this share of the best", float, lambda v: 0 <= v <= 1, "0 to 1"),
    Parameter("repetition_penalty", "above 1 avoids tokens seen before", float, lambda v: 0 < v < 100, "above 0"),
    Parameter("presence_penalty", "subtracted once from tokens said", float, lambda v: -100 < v < 100, "a number"),
    Parameter("frequency_penalty", "subtracted for every time said", float, lambda v: -100 < v < 100, "a number"),
    Parameter("seed", "same seed, same machine, same tokens", _whole, lambda v: 0 <= v < 2**64, "0 to 2^64 - 1"),
    Parameter("max_tokens", "at most this many tokens an answer", _whole, lambda v: v >= 1, "1 or more"),
    Parameter("stop", "end the answer before this text; several: a | b", _texts, lambda v: all(v), "not empty"),
    Parameter("thinking", "of a reasoning model", _switch, lambda v: v in (True, False, None), "on, off or auto"),
)
_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def read_parameter(name: str, text: str) -> Any:
    """A parameter's value from text; None for empty text or `default`. Raises UsageError."""
    parameter = _BY_NAME.get(name.replace("-", "_"))
    if parameter is None:
        raise UsageError(f"there is no parameter {name!r}", "one of " + ", ".join(_BY_NAME))
    if not text.strip() or text.strip() == "default":
        return None
    try:
        value = parameter.read(text.strip())
    except ValueError:
        raise UsageError(f"{parameter.name} must be {parameter.range}, not {text.strip()!r}") from None
    if not parameter.holds(value):
        raise UsageError(f"{parameter.name} must be {parameter.range}")
    return value


def write_parameter(name: str, values: Mapping[str, Any]) -> str:
    """A parameter's value as text, empty where it is not set."""
    value = values.get(name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " | ".join(part.replace("\n", "\\n") for part in value) if name == "stop" else f"{value}"
