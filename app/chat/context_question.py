"""What a person is asked or told when the context is full, and the answers there are."""

from dataclasses import dataclass
from typing import Literal

ContextChoice = Literal["drop", "summarise", "new"]


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """The context is full: the user has to choose what goes.

    tokens: what the prompt would have, or what prompt and answer have grown to. during_answer: the answer ran into
    the limit and is kept as partial; after `drop` or `summarise` it is continued. leaf: the message concerned.
    """

    tokens: int
    limit: int
    during_answer: bool
    leaf: int


def context_full_notice(tokens: int, limit: int, why: str) -> str:
    """What is said where there is nothing to choose from, and `why` that is.

    The context is full before its last token is taken: an answer needs some room.
    """
    if tokens < limit:
        return f"too little room for an answer: {tokens:,} of the context's {limit:,} tokens are taken; {why}"
    return f"the context is full: {tokens:,} tokens, the limit is {limit:,}; {why}"
