"""The parameters a session can have: how each is written, read and checked. Knows no widget.

The numbers that they can be are those of the settings file, all of which `runtime.sampling.params` takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.app.config.settings import SPECULATE, sampling_range
from headrace.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Parameter:
    """`read` turns text into a value; `holds` says whether the value is in range, `range` says it in words."""

    name: str
    help: str
    read: Callable[[str], Any]
    holds: Callable[[Any], bool]
    range: str


def _texts(text: str) -> list[str]:
    """Several stop texts are separated by ` | `; \\n stands for a line break."""
    return [part.replace("\\n", "\n") for part in text.split(" | ") if part]


def _switch(text: str) -> bool | None:
    try:
        return {"on": True, "off": False, "auto": None}[text]
    except KeyError:
        raise ValueError(text) from None


def _number(name: str, help: str, read: Callable[[str], float]) -> Parameter:
    allowed = sampling_range(name)
    return Parameter(name, help, read, allowed.holds, str(allowed))


PARAMETERS = (
    _number("temperature", "0 is greedy", float),
    _number("top_p", "fewest tokens with this much probability", float),
    _number("top_k", "only the k most likely; 0 is off", int),
    _number("min_p", "drop tokens below this share of the best", float),
    _number("repetition_penalty", "above 1 avoids tokens seen before", float),
    _number("presence_penalty", "subtracted once from tokens said", float),
    _number("frequency_penalty", "subtracted for every time said", float),
    _number("seed", "same seed, same machine, same tokens", int),
    _number("max_tokens", "at most this many tokens an answer", int),
    Parameter("stop", "end the answer before this text; several: a | b", _texts, lambda v: all(v), "not empty"),
    Parameter("speculate", "guess tokens ahead; answers stay the same", str, SPECULATE.__contains__, "off or ngram"),
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
