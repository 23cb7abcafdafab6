"""The question of a full context, and its choices."""

from dataclasses import dataclass
from typing import Literal

ContextChoice = Literal["drop", "summarise", "new"]
EVERY_CHOICE: tuple[ContextChoice, ...] = ("drop", "summarise", "new")


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
    choices: tuple[ContextChoice, ...] = EVERY_CHOICE


def context_full_notice(tokens: int, limit: int, why: str) -> str:
    """Return the notice if there is no choice. why: the reason.

    A prompt shorter than the limit may leave too little room for an answer.
    """
    if tokens < limit:
        return f"too little room for an answer: {tokens:,} of the context's {limit:,} tokens are taken; {why}"
    return f"the context is full: {tokens:,} tokens, the limit is {limit:,}; {why}"
