"""What an answer cost, in words: the same on the command line, in the transcript, the decode view and an export."""

from headrace.runtime.units import format_seconds, three_digits


def rate(tokens_per_second: float | None) -> str:
    """A decode speed: `9.84 tok/s`, `96.1 tok/s`, `212 tok/s`."""
    return f"{rate_digits(tokens_per_second)} tok/s"


def rate_digits(tokens_per_second: float | None) -> str:
    """The same where its unit stands elsewhere."""
    return "–" if tokens_per_second is None else three_digits(tokens_per_second)


def time_to_first_token(seconds: float) -> str:
    """`TTFT 51.3 ms`, `TTFT 1.20 s`."""
    return f"TTFT {format_seconds(seconds)}"


def phrases(tokens: int, tokens_per_second: float | None, ttft_s: float | None, mbu: float | None) -> list[str]:
    """The account every answer ends with, what matters most first; what is not known (None) is left out.

    mbu: a fraction of the measured peak.
    """
    parts = [f"{tokens} tokens"]
    if tokens_per_second is not None:
        parts.append(rate(tokens_per_second))
    if ttft_s is not None:
        parts.append(time_to_first_token(ttft_s))
    if mbu is not None:
        parts.append(f"MBU {mbu:.0%}")
    return parts
