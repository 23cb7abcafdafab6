"""State of a growing list whose first items are finished: number, tightness, source."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it.token import Token

LISTS = ("bullet_list_open", "ordered_list_open")


@dataclass(frozen=True, slots=True)
class OpenList:
    """A list at the end of the text with finished items."""

    source: str  # of those items
    begins: int  # the first of their lines among all finished ones, be it the blank one above the list
    tight: bool  # without blank lines between items
    number: int | None  # of the next item, where it has one


def is_tight(tokens: list["Token"], source: str) -> bool | None:
    """Return whether the list at the start of `source` has no blank lines between its parts; None if that is still
    open.

    The parser hides the paragraphs of a tight list; there may be none.
    """
    end = tokens.index(end_of_list(tokens))
    paragraphs = [token for token in tokens[:end] if token.type == "paragraph_open" and token.level == 2]
    if paragraphs:
        return all(token.hidden for token in paragraphs)
    last = tokens[0].map[1] if tokens[0].map else 0
    return None if "" in map(str.strip, source.split("\n")[:last]) else True


def end_of_list(tokens: list["Token"]) -> "Token":
    """Return the token that closes the list at the start."""
    return next(token for token in tokens[1:] if token.level == 0)


def continue_list(opened: OpenList, tokens: list["Token"]) -> None:
    """Number and space a list's items like those before them."""
    if opened.number is not None:
        tokens[0].attrs["start"] = opened.number
    if not opened.tight:
        for token in tokens[1 : tokens.index(end_of_list(tokens))]:
            if token.type == "paragraph_open" and token.level == 2:
                token.hidden = False


def shift_lines(tokens: list["Token"], by: int) -> list["Token"]:
    """Return the tokens with their line numbers reduced by `by`."""
    for token in tokens:
        if token.map:
            token.map = [line - by for line in token.map]
    return tokens


def first_line(block: "Token") -> int:
    """Return the block's first source line."""
    return block.map[0] if block.map else 0
