"""The question of a full context, and its choices."""

from dataclasses import dataclass
from typing import Literal

ContextChoice = Literal["drop", "summarise", "new"]
DiskChoice = Literal["again", "unsaved"]

CONTEXT_CHOICES: tuple[tuple[ContextChoice, str, str], ...] = (
    ("drop", "d", "leave out the oldest turns"),
    ("summarise", "s", "summarise the oldest turns, then leave them out"),
    ("new", "n", "continue in a new session"),
)
"""Choices with a key and a description."""
DISK_CHOICES: tuple[tuple[DiskChoice, str, str], ...] = (
    ("again", "t", "try again: there is room now"),
    ("unsaved", "u", "go on; nothing more is saved"),
)
"""Choices after the disk of the sessions was full."""


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """The user has to choose which turns to leave out.

    tokens: of the prompt, or of prompt and answer. during_answer: the answer reached the limit and is kept as partial;
    `drop` and `summarise` continue it. leaf: the message concerned. choices: those that can work.
    """

    tokens: int
    limit: int
    during_answer: bool
    leaf: int
    choices: tuple[ContextChoice, ...] = ("drop", "summarise", "new")

    @property
    def text(self) -> str:
        """The question in words."""
        return (
            f"{'With this answer' if self.during_answer else 'With your message'} the conversation has "
            f"{self.tokens:,} tokens; the context holds {self.limit:,}, answer included. "
            "Nothing is removed without your choice."
        )


def context_full_notice(tokens: int, limit: int, why: str) -> str:
    """Return the notice if there is no choice. why: the reason.

    A prompt shorter than the limit may leave too little room for an answer.
    """
    if tokens < limit:
        return f"too little room for an answer: {tokens:,} of the context's {limit:,} tokens are taken; {why}"
    return f"the context is full: {tokens:,} tokens, the limit is {limit:,}; {why}"
