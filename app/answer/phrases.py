"""Phrases of an answer's figures and sampling, the same on every surface."""

from collections.abc import Mapping
from typing import Any

from headrace.runtime.metrics.units import format_seconds, three_digits

_FILTERS = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))  # with the value at which each is off


def rate_digits(tokens_per_second: float | None) -> str:
    """Return a decode speed in tok/s: `9.84`, `96.1`, `212`."""
    return "–" if tokens_per_second is None else three_digits(tokens_per_second)


def duration(seconds: float | None) -> str:
    """Return a duration: `51.3 ms`, `1.20 s`."""
    return "–" if seconds is None else format_seconds(seconds)


def plain_phrases(tokens: int, tokens_per_second: float | None, ttft_s: float | None) -> list[str]:
    """Return token count, speed and time to first text in words for everybody."""
    parts = phrases(tokens, tokens_per_second, None, None)
    return parts if ttft_s is None else [*parts, f"first token after {ttft_s:.2f} s"]


def phrases(tokens: int, tokens_per_second: float | None, ttft_s: float | None, mbu: float | None) -> list[str]:
    """Return the figures at the end of an answer, most important first; None is left out.

    mbu: a fraction of the measured peak.
    """
    parts = [f"{tokens:,} token{'' if tokens == 1 else 's'}"]
    if tokens_per_second is not None:
        parts.append(f"{rate_digits(tokens_per_second)} tok/s")
    if ttft_s is not None:
        parts.append(f"TTFT {duration(ttft_s)}")
    if mbu is not None:
        parts.append(f"MBU {mbu:.0%}")
    return parts


def sampling_text(values: Mapping[str, Any], *, short: bool = False) -> str:
    """Return sampling in one line: `temperature 0.7 · min_p 0.05`; `short`: `temp 0.7`."""
    temperature = f"temperature {values.get('temperature', 0.0):g}"
    if short:
        return temperature.replace("erature", "")
    if not values.get("temperature"):
        return temperature
    parts = [f"{name} {values[name]:g}" for name, off in _FILTERS if values.get(name, off) != off]
    return " · ".join([temperature, *parts])
