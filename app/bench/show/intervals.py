"""Intervals of a benchmark's figures as text; a single round has none."""

from collections.abc import Callable

from headrace.app.output.document import Document
from headrace.app.output.figures import decimals


def interval(figure: Document, form: Callable[[float], str], between: str = " to ") -> str:
    """Format a figure's interval; empty for a single round, which has none."""
    low, high = figure["low"], figure["high"]
    return "" if low is None or high is None else f"{form(low)}{between}{form(high)}"


def spread(speed: Document) -> float | None:
    """Return the standard deviation; None for a single round, which has none."""
    return None if speed["low"] is None else float(speed["sd"])


def above_one(ratio: Document) -> bool:
    """Return whether a ratio's whole interval is above 1."""
    return ratio["low"] is not None and ratio["low"] > 1


def below_one(ratio: Document) -> bool:
    """Return whether a ratio's whole interval is below 1."""
    return ratio["high"] is not None and ratio["high"] < 1


def bracketed(figure: Document, form: Callable[[float], str] = decimals) -> str:
    """Format a figure's interval to stand behind it: ` (1.25 to 1.36)`."""
    text = interval(figure, form)
    return f" ({text})" if text else ""
