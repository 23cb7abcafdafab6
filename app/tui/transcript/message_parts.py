"""Code blocks and web addresses of a message."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.app.output.markdown_parser import is_web_address, parser

if TYPE_CHECKING:
    from markdown_it.token import Token

_ADDRESS = re.compile(r"https?://[^\s<>\"'`|\\^{}]+")
_TRAILING = ".,;:!?)]*_"


def code_blocks(text: str) -> list[str]:
    """Return the fenced and indented code of a Markdown text, in order."""
    return [token.content for token in parser().parse(text) if token.type in ("fence", "code_block")]


def web_addresses(text: str) -> list[str]:
    """Return the web addresses of a Markdown text, links and plain ones, each once, in order; none in code."""
    addresses = (address for token in parser().parse(text) for child in token.children or [] for address in _in(child))
    return list(dict.fromkeys(address for address in addresses if is_web_address(address)))


def _in(child: "Token") -> Iterator[str]:
    if child.type == "link_open":
        yield str(child.attrs["href"])
    elif child.type == "image":
        yield str(child.attrs["src"])
    elif child.type == "text":
        for match in _ADDRESS.finditer(child.content):
            yield match[0].rstrip(_TRAILING)
