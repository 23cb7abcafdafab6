"""Markdown that grows: only its last block is parsed and laid out again when text arrives.

A top-level block is finished once another one has begun after it; its lines are kept until the width or the theme
changes. So a long answer costs no more per update than its last block.
"""

from typing import TYPE_CHECKING

from textual.content import Content

from headrace.app.tui.transcript.markdown_lines import BLANK, parser, render_tokens

if TYPE_CHECKING:
    from markdown_it.token import Token


class GrowingMarkdown:
    """The text so far and its lines."""

    def __init__(self, text: str = "") -> None:
        self.text = ""
        self._width = 0
        self._look = (False, True)
        self._finished: list[str] = []  # sources of finished blocks
        self._finished_lines: list[Content] = []
        self._tail = ""
        self._tail_lines: list[Content] | None = None
        self._before: list[Content] = []  # the tail's lines as they were laid out last
        self.append(text)

    def append(self, text: str) -> None:
        """More text."""
        if text:
            self.text += text
            self._tail += text
            self._tail_lines = None

    def lines(self, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
        """Everything laid out at this width. The list is the caller's to keep, not to change."""
        if (width, (ansi, dark)) != (self._width, self._look):
            self._width, self._look = width, (ansi, dark)
            self._finished_lines, self._before = [], []
            for source in self._finished:
                self._finish(parser().parse(source))
            self._tail_lines = None
        if self._tail_lines is None:
            tokens = self._settled(parser().parse(self._tail))
            self._tail_lines = _reusing(self._before, self._laid_out(tokens))
            self._before = self._tail_lines
        between = [BLANK] if self._finished_lines and self._tail_lines else []
        return [*self._finished_lines, *between, *self._tail_lines]

    def _settled(self, tokens: list["Token"]) -> list["Token"]:
        """Move finished blocks from the tail, which parses as `tokens`, to where they stay; the tokens of the rest.

        The last block is never finished. Nor is one before it that it may turn out to belong to: a list, or whatever
        stands right above the last line, or above the two that make a table's head, as long as that line may grow
        (`#` begins a heading, `#tag` does not).
        """
        blocks = [place for place, token in enumerate(tokens) if token.level == 0 and token.map and token.nesting >= 0]
        last = len(blocks) - 1
        source = self._tail.split("\n")
        if last > 0 and (begin := _first_line(tokens[blocks[last]])) >= len(source) - 2 and source[begin - 1].strip():
            last -= 1
        if last > 0 and tokens[blocks[last - 1]].type in ("bullet_list_open", "ordered_list_open"):
            last -= 1
        if last < 1:
            return tokens
        first = blocks[last]  # of the tokens that stay in the tail
        begin = _first_line(tokens[first])
        head, self._tail = "\n".join(source[:begin]) + "\n", "\n".join(source[begin:])
        self._finished.append(head)
        self._before = self._before[self._finish(tokens[:first]) + 1 :]  # past the blank line between
        return tokens[first:]

    def _finish(self, tokens: list["Token"]) -> int:
        """Lay these blocks out for good; how many lines they are."""
        lines = _reusing(self._before, self._laid_out(tokens))
        if self._finished_lines and lines:
            self._finished_lines.append(BLANK)
        self._finished_lines += lines
        return len(lines)

    def _laid_out(self, tokens: list["Token"]) -> list[Content]:
        ansi, dark = self._look
        return render_tokens(tokens, self._width, ansi=ansi, dark=dark)


def _first_line(block: "Token") -> int:
    return block.map[0] if block.map else 0


def _reusing(old: list[Content], new: list[Content]) -> list[Content]:
    """`new`, with the very objects of `old` where nothing changed: what was drawn from them stays good."""
    for place, (before, line) in enumerate(zip(old, new, strict=False)):
        if before.is_same(line):
            new[place] = before
    return new
