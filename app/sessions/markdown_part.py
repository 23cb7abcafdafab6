"""Markdown of a message as one part of a document: it can neither end the part nor begin another one.

Headings move below those of the document, HTML shows as written, and an open code block is closed.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_LOWER = 2  # levels: `#` and `##` belong to the document
_LOWEST = 6
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!https?://[^\s<>]*>)")  # but no address in angle brackets
_UNDERLINE = re.compile(r"^([ \t>]*)((?:=+|-+)[ \t]*)$")
_CODE = re.compile(r"((?<![`\\])(`+)(?!`).*?(?<!`)\2(?!`))", re.DOTALL)


def markdown_part(text: str) -> str:
    """Return Markdown that stays within its part of a document."""
    lines = _without_html(_without_underlines(text.split("\n")))
    tokens = _parser().parse("\n".join(lines))
    for token in tokens:
        if token.type == "heading_open" and token.map is not None:
            _lower(lines, token)
    if (
        tokens
        and tokens[-1].type == "fence"
        and (ending := _parser().parse("\n".join([*lines, "", "x"])))[-1].type == "fence"
    ):
        lines.append(ending[-1].markup)
    return "\n".join(lines)


def markdown_line(text: str) -> str:
    """Return text for one line of Markdown, without HTML."""
    return _TAG.sub("&lt;", " ".join(text.split()))


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark")


def _lower(lines: list[str], heading: "Token") -> None:
    """Lower a heading by two levels."""
    assert heading.map is not None
    level = min(len(heading.markup) + _LOWER, _LOWEST)
    lines[heading.map[0]] = lines[heading.map[0]].replace(heading.markup, "#" * level, 1)


def _without_underlines(lines: Sequence[str]) -> list[str]:
    """Escape the lines that make a heading of the line above."""
    changed = list(lines)
    for start, end in _plain_runs(lines):
        for place in range(max(start, 1), end):
            if lines[place - 1].strip():
                changed[place] = _UNDERLINE.sub(r"\1\\\2", lines[place])
    return changed


def _without_html(lines: Sequence[str]) -> list[str]:
    """Escape tags outside of code; inside of what may be code, too, if a parser still finds one."""
    for in_code in (_escape_around_code, _escape):
        changed = list(lines)
        for start, end in _plain_runs(lines):
            changed[start:end] = in_code("\n".join(lines[start:end])).split("\n")
        if not _has_html(_parser().parse("\n".join(changed))):
            break
    return changed


def _plain_runs(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the runs of lines that are in no code block."""
    start = 0
    for token in _parser().parse("\n".join(_escape(line) for line in lines)):
        if token.type in ("fence", "code_block") and token.map is not None:
            if start < token.map[0]:
                yield start, token.map[0]
            start = token.map[1]
    if start < len(lines):
        yield start, len(lines)


def _escape(text: str) -> str:
    return _TAG.sub("&lt;", text)


def _escape_around_code(text: str) -> str:
    parts = _CODE.split(text)  # text, code, its backticks, text, ...
    return "".join(_escape(part) if place % 3 == 0 else part for place, part in enumerate(parts) if place % 3 != 2)


def _has_html(tokens: Sequence["Token"]) -> bool:
    return any(token.type.startswith("html_") or _has_html(token.children or ()) for token in tokens)
