"""Text of a message in an export: no heading of the document, no HTML, and no block that goes on behind it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from headrace.app.sessions.export import markdown_line, markdown_part

PARSER = MarkdownIt("commonmark")
PIECES = st.sampled_from([
    "# a", "## You", "You\n---", "You\n===", "<script>x</script>", "</details>", "<!--", "<b>", "<https://e.org/a>",
    "`", "``", "```", "~~~", "````", "\\", "    ", "> ", "- ", "1. ", "\n", "\n\n", "a", " ", "&lt;", "| a |", "***",
    "\t", "<a\n>", "[end]: /e", "[a]: <e>", "[a]", "![", "](e.png)", "![a](e.png)", "!", "[a\n]: e",
])  # fmt: skip


def flat(tokens: list[Token]) -> list[Token]:
    return [each for token in tokens for each in (token, *flat(token.children or []))]


def stays_a_part(part: str) -> None:
    """Check a part by what a parser makes of a document around it."""
    tokens = flat(PARSER.parse(f"## You\n\n{part}\n\n## Answer\n\n[end]"))
    headings = [token for token in tokens if token.type == "heading_open" and token.tag in ("h1", "h2")]
    assert [heading.level for heading in headings] == [0, 0], part
    assert not [token for token in tokens if token.type.startswith("html_")], part
    assert not [token for token in tokens if token.type == "image"], part
    assert (tokens[-2].type, tokens[-2].content) == ("text", "[end]"), part


@example(["<script>", "\n", "`", "<script>", "\n\n", "`"])
@example(["```", "\n", "<script>"])
@example(["- ", "You\n---"])
@given(st.lists(PIECES, max_size=12))
def test_no_message_text_escapes_its_part_of_a_markdown_export(pieces: list[str]) -> None:
    stays_a_part(markdown_part("".join(pieces).strip()))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("plain *text* 1 < 2 <https://e.org>", "plain *text* 1 < 2 <https://e.org>"),
        ("# One\n\n- ### Three", "### One\n\n- ##### Three"),
        ("say `<b>` and <b>", "say `<b>` and &lt;b>"),
        ("```html\n<b># x</b>\n```\n<b>", "```html\n<b># x</b>\n```\n&lt;b>"),
        ("```py\nx = 1", "```py\nx = 1\n```"),
        ("You\n===", "You\n\\==="),
        ("see ![a](e.png), `![a]` and \\![a]", "see \\![a](e.png), `![a]` and \\![a]"),
        ("[a] and\n\n[a]: https://e.org 'b'\n\n    [a]: code", "[a] and\n\n\\[a]: https://e.org 'b'\n\n    [a]: code"),
    ],
)
def test_code_is_unchanged_and_other_markdown_is_escaped(text: str, part: str) -> None:
    assert markdown_part(text) == part


def test_a_title_stays_on_one_line_of_markdown() -> None:
    assert markdown_line("a\n\n# b <script>") == "a # b &lt;script>"
