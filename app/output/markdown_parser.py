"""Markdown parsers for model text: CommonMark with tables and strikethrough, without HTML, with web links only."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


@cache
def parser() -> "MarkdownIt":
    """Return the shared parser. Its images are rendered as text: nothing is fetched."""
    from markdown_it import MarkdownIt  # with the first answer, not with the first frame
    from markdown_it.common.utils import escapeHtml

    class WebLinks(MarkdownIt):
        def validateLink(self, url: str) -> bool:  # noqa: N802 - markdown-it's name
            return is_web_address(url)

    def image(_renderer: Any, tokens: Any, place: int, *_: Any) -> str:
        return escapeHtml(f"▨ {tokens[place].content} ⟨{tokens[place].attrs['src']}⟩")

    made = WebLinks("commonmark", {"html": False}).enable(["table", "strikethrough"])
    made.add_render_rule("image", image)
    return made.disable(["reference", "html_inline", "html_block"])


def is_web_address(address: str) -> bool:
    """Return True for an address of the web; other links stay text."""
    return address.startswith(("http://", "https://")) and address.isprintable() and address.isascii()
