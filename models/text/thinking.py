"""Splits what a reasoning model says into its thinking and its answer.

The section is `<think> ... </think>` at the very beginning; anything like it further on is text. Works on the whole
text so far, as often as a screen is drawn: nothing has to be remembered between two looks.
"""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Parts:
    """thinking: None where there is no section. is_open: the section has not ended yet."""

    thinking: str | None
    answer: str
    is_open: bool = False


def split_thinking(text: str, *, growing: bool = False) -> Parts:
    """The parts of `text`. While it is `growing`, half a tag at its end belongs to neither part yet."""
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
    """How many characters at the end may be the beginning of the closing tag."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
