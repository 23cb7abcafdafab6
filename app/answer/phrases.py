"""Phrases of an answer's figures and sampling, the same on every surface.

The chat, `run`, `batch` and exported sessions take them from here.

Guard: tests/app/answer/test_phrases.py.
"""

from collections.abc import Mapping

from msgspec.structs import asdict

from headrace.app.answer.options import SamplingSource
from headrace.runtime.metrics.telemetry import Summary
from headrace.runtime.metrics.units import counted, format_seconds, percent, three_digits
from headrace.runtime.sampling.params import SamplingParams

# Options that are shown if they differ from the value here, which changes nothing; in this order.
_FILTERS = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0))
_SOURCES: Mapping[SamplingSource, str] = {
    "options": "as asked",
    "session": "of the conversation",
    "settings": "of the settings",
    "model": "recommended for the model",
    "default": "none recommended",
}

ENDINGS: Mapping[str, tuple[str, str]] = {
    "cancelled": ("■", "stopped"),
    "length": ("▲", "limit reached"),
    "died": ("✗", "the engine died"),
    "failed": ("✗", "failed"),
    "damaged": ("✗", "damaged on the disk"),
}
"""Reasons other than `stop` for which an answer ended: a mark and words."""


def plain_phrases(tokens: int, tokens_per_second: float | None, ttft_s: float | None) -> list[str]:
    """Return token count, speed and time to first text in words for everybody."""
    parts = phrases(tokens, tokens_per_second, ttft_s=None, mbu=None)
    if ttft_s is not None:
        parts.append(f"first token after {ttft_s:.2f} s")
    return parts


def mbu_text(mbu: float | None, *, busy: bool) -> str:
    """Return an MBU: `31 %`, `busy` if other programs slowed the steps down, `–` if unknown."""
    if busy:
        return "busy"
    if mbu is None:
        return "–"
    return percent(mbu)


def phrases(
    tokens: int, tokens_per_second: float | None, ttft_s: float | None, mbu: float | None, *, busy: bool = False
) -> list[str]:
    """Return the figures at the end of an answer, most important first; None is left out.

    tokens: of the answer.
    tokens_per_second: decode speed.
    ttft_s: seconds to the first text.
    mbu, busy: see `mbu_text`.
    """
    parts = [counted(tokens, "token")]
    if tokens_per_second is not None:
        parts.append(f"{three_digits(tokens_per_second)} tok/s")
    if ttft_s is not None:
        parts.append(f"TTFT {format_seconds(ttft_s)}")
    if busy or mbu is not None:
        parts.append(f"MBU {mbu_text(mbu, busy=busy)}")
    return parts


def summary_phrases(summary: Summary) -> list[str]:
    """Return `phrases` of a stored answer."""
    rate = summary.decode_tokens_per_second
    return phrases(summary.completion_tokens, rate, summary.ttft_s, summary.mbu, busy=summary.busy)


def sampling_in_effect(values: Mapping[str, object], *, short: bool = False) -> str:
    """Return `sampling_text`, or a phrase for the unknown temperature of a model that is not loaded."""
    if "temperature" not in values:
        return "" if short else "the model's sampling"
    return sampling_text(values, short=short)


def sampling_text(values: Mapping[str, object], *, short: bool = False) -> str:
    """Return sampling in one line: `temperature 0.7 · min_p 0.05`; `short`: `temp 0.7`."""
    value = values.get("temperature", 0.0)
    if short:
        return f"temp {value:g}"
    temperature = f"temperature {value:g}"
    if not value:  # greedy: the filters change nothing
        return temperature
    filters = [f"{name} {values[name]:g}" for name, off in _FILTERS if values.get(name, off) != off]
    return " · ".join([temperature, *filters])


def sampling_phrase(params: SamplingParams, source: SamplingSource) -> str:
    """Return sampling and its origin: `temperature 0.2 · top_p 0.9 (recommended for the model), seed 7`."""
    phrase = f"{sampling_text(asdict(params))} ({_SOURCES[source]})"
    if params.greedy or params.seed is None:
        return phrase
    return f"{phrase}, seed {params.seed}"
