"""Separation of a reasoning model's thinking from its answer.

The section is `<think> ... </think>` at the beginning of the text; later tags are plain text. Stateless: it takes the
whole text so far.
"""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"
LEVELS = ("low", "medium", "high")
Thinking = bool | int | str
"""Thinking on or off, its budget in tokens, or one of LEVELS."""


@dataclass(frozen=True, slots=True)
class Parts:
    """thinking: None without a section. is_open: the section has not ended yet."""

    thinking: str | None
    answer: str
    is_open: bool = False


def split_thinking(text: str, *, growing: bool = False) -> Parts:
    """Split `text`. While it is `growing`, half a tag at its end is left out of both parts."""
    start = text.lstrip()
    if not start.startswith(OPEN):
        if growing and OPEN.startswith(start):
            return Parts(None, "")
        return Parts(None, text)
    body = start[len(OPEN) :]
    thinking, tag, answer = body.partition(CLOSE)
    if tag:
        return Parts(thinking.strip("\n"), answer.lstrip("\n"))
    if growing:
        thinking = thinking[: len(thinking) - _half_tag(thinking)]
    return Parts(thinking.strip("\n"), "", is_open=True)


def _half_tag(text: str) -> int:
    """Return the number of characters at the end that may begin the closing tag."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
