"""Markdown parser for model text: CommonMark with tables, strikethrough and LaTeX, no HTML, links to the web only.

The transcript of the chat, the inline chat and exported HTML pages render model text through it. Reference links are
off: blocks are rendered one by one, and a later definition would change links above it. Blocks nested too deeply are
paragraphs, so that no text is lost.

Guards: tests/tui/test_safety.py and test_parts.py, tests/app/output/test_rendered_markdown.py, and
tests/app/sessions/test_html_page.py.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

# A formula in LaTeX, `\[ x^2 \]` or `\( x \)`, or one of its marks: the rest is still to come. The bound keeps many
# marks from taking long.
_FORMULA = re.compile(r"\\\[.{0,2000}?\\\]|\\\(.{0,2000}?\\\)|\\[\[\]()]", re.DOTALL)


@cache
def parser() -> "MarkdownIt":
    """Return the shared parser. Its images are rendered as text: nothing is fetched."""
    from markdown_it import MarkdownIt  # with the first answer, not with the first frame
    from markdown_it.common.utils import escapeHtml

    class WebLinks(MarkdownIt):
        def validateLink(self, url: str) -> bool:  # noqa: N802 - markdown-it's name
            return is_web_address(url)

    def image(_renderer: Any, tokens: Any, index: int, *_: object) -> str:
        return escapeHtml(image_text(tokens[index]))

    made = WebLinks("commonmark", {"html": False}).enable(["table", "strikethrough"])
    made.add_render_rule("image", image)
    made.inline.ruler.before("escape", "latex", _formula)
    made.block.ruler.before("table", "deep", _deep_block)
    return made.disable(["reference", "html_inline", "html_block"])


def image_text(token: "Token") -> str:
    """Return the text that stands for an image: its description and its address."""
    return f"▨ {token.content} ⟨{token.attrs['src']}⟩"


def _deep_block(state: "StateBlock", start_line: int, end_line: int, silent: bool) -> bool:
    """Make a paragraph of any block at the deepest levels, its marks as written."""
    # markdown-it drops blocks at level `maxNesting`. A list and its item are two levels.
    if state.level < state.md.options.maxNesting - 2:
        return False
    from markdown_it.rules_block import paragraph

    return paragraph(state, start_line, end_line, silent)


def _formula(state: "StateInline", silent: bool) -> bool:
    """Keep a LaTeX formula as it is: Markdown would take the backslashes of its marks, and its `_` for emphasis."""
    match = _FORMULA.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.pending += match[0]
    state.pos = match.end()
    return True


def is_web_address(address: str) -> bool:
    """Return True for an address of the web; other links stay text."""
    return address.startswith(("http://", "https://")) and address.isprintable() and address.isascii()
