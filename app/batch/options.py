"""What a line may say about how it is answered: the names, and what each of them can be.

The names are those of `headrace run`'s options. A value of another type is refused, never converted: "0.7" is a text.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.app.answer.sampling_options import sampling_settings
from headrace.app.config.settings import SPECULATE
from headrace.models.text.stop_strings import StopMatcher
from headrace.runtime.errors import UsageError
from headrace.runtime.sampling.params import SamplingParams

_SHOWN = 40  # characters of a value that is refused


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among `given` that are set: null is the same as leaving a key out. Raises UsageError."""
    read = {key: _KINDS[key](key, value) for key, value in given.items() if key in _KINDS and value is not None}
    check_options(read)
    return read


def options_for_all(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for lines that say nothing else: the command line over the settings. Raises UsageError.

    given: by the names of a command's options, None or () where they were not given; --logit-bias as it takes it.
    """
    options = {**settings, **{key: value for key, value in given.items() if value is not None and value != ()}}
    if given.get("logit_bias"):
        options["logit_bias"] = sampling_settings({"logit_bias": given["logit_bias"]}, {})["logit_bias"]
    check_options(options)
    return options


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a value out of range."""
    sampling_params(options, {})
    StopMatcher(options.get("stop", ()))


def sampling_params(options: Mapping[str, Any], recommended: Mapping[str, Any]) -> SamplingParams:
    """How to sample a line with these options on a model that recommends these. Raises UsageError."""
    sampling = {key: value for key, value in options.items() if key not in _NOT_SAMPLING}
    return SamplingParams(**{**sampling_settings(sampling, recommended), "logit_bias": options.get("logit_bias", {})})


def refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    """Raises UsageError that names the first key that means nothing here: what is not understood is not left out."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def shown(value: object) -> str:
    """A refused value in an error: one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def text(key: str, value: Any) -> str:
    """`value`, if it is one. Raises UsageError."""
    if not isinstance(value, str):
        raise UsageError(f"{key} must be a text, not {shown(value)}")
    return value


def flag(key: str, value: Any) -> bool:
    """`value`, if it is one. Raises UsageError."""
    if not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, not {shown(value)}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{key} must be a number, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{key} is too large a number") from None


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{key} must be a whole number, not {shown(value)}")
    return value


def _count(key: str, value: Any) -> int:
    if _whole(key, value) < 1:
        raise UsageError(f"{key} must be at least 1")
    return int(value)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise UsageError(f"{key} must be a text or a list of texts, not {shown(value)}")
    return tuple(text(key, one) for one in value)


def _bias(key: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} must be an object of token ids and numbers, not {shown(value)}")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in value):
        raise UsageError(f"the keys of {key} must be token ids")
    return {int(token): _number(key, added) for token, added in value.items()}


def _speculate(key: str, value: Any) -> str:
    if value not in SPECULATE:
        raise UsageError(f"{key} must be {' or '.join(SPECULATE)}, not {shown(value)}")
    return text(key, value)


_KINDS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_tokens": _count,
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _bias,
    "seed": _whole,
    "stop": _texts,
    "speculate": _speculate,
    "thinking": flag,
}
OPTIONS = frozenset(_KINDS)
_NOT_SAMPLING = ("max_tokens", "speculate", "stop", "thinking", "logit_bias")
