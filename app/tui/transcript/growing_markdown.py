"""Incremental Markdown: only the last block is parsed again when text arrives.

A top-level block is finished once another one has begun; its lines are kept until the width or theme changes. Code
added to a block has no colours until `highlight_code`.

However the text is cut, the lines end as if all of it had come at once; tests/tui/test_parts.py compares. `Entry` has
one for an answer and one for its thinking.
"""

import re
from typing import TYPE_CHECKING

from msgspec import Struct
from textual.content import Content

from headrace.app.output.markdown_parser import parser
from headrace.app.tui.transcript.markdown_lines import BLANK, code_lines, render_tokens

if TYPE_CHECKING:
    from markdown_it.token import Token


# The beginning of a line in words, also in a list or a quotation: `The mill`, `- *then`, `> 'It`. No heading, no code.
_IN_WORDS = re.compile(r" {0,3}(?:(?:[-*+>]|\d+[.)]) +)?[*_\"'(]*[^\W\d_]")
_OPEN = "`*_~[]<>&\\!"  # characters whose meaning later ones may change
_LISTS = ("bullet_list_open", "ordered_list_open")
_CLOSES_CODE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)  # a line that may be the closing fence


class _OpenCode(Struct, frozen=True):
    """A code block without its closing fence, and without its last line, which may still grow.

    source: from the opening fence to the newline before the last line.
    lines: the lines of `source`, with colours.
    """

    source: str
    lines: list[Content]


class GrowingMarkdown:
    """The text so far and its lines: finished blocks, and after them the tail.

    `append` only adds text. `lines` does all layout: of the tail when it has grown, of everything when the width or
    theme has changed.

    _width, _colours: layout of the lines in the fields below, in cells and as (ansi, dark). `lines` with another layout
        clears `_finished_lines`, `_before`, `_code` and `_tail_lines`, and lays out all text again.
    _finished: sources of finished blocks, never changed. They are needed for another layout.
    _finished_lines: lines of these blocks, with blank lines between them.
    _tail: text after the finished blocks. `append` extends it; `_settled` removes finished blocks from its start.
    _tail_lines: lines of the tail; None from `append`, or from `highlight_code` where colours are due, to the next
        `lines`.
    _before: lines of the tail from its latest layout. Unlike `_tail_lines`, they stay after `append`: the next layout
        takes equal lines from here, so that the same objects come back and are not drawn again. `_settled` removes the
        lines of blocks that it finishes.
    _code: the open code block, if it is the whole tail; else None. `_tail_laid_out` sets it. `_with_code_added` uses it
        to lay out only added code. `highlight_code` clears it: then the whole block is laid out, with colours.
    _rough: code in `_tail_lines` has no colours. `_with_code_added` sets it, `_tail_laid_out` clears it.
    """

    def __init__(self, text: str = "") -> None:
        self.text = ""
        self._width = 0
        self._colours = (False, True)
        self._finished: list[str] = []
        self._finished_lines: list[Content] = []
        self._tail = ""
        self._tail_lines: list[Content] | None = None
        self._before: list[Content] = []
        self._code: _OpenCode | None = None
        self._rough = False
        self.append(text)

    def append(self, text: str) -> None:
        if text:
            self.text += text
            self._tail += text
            self._tail_lines = None

    @property
    def in_words(self) -> bool:
        """True if the text ends in a paragraph line that stays one when words follow."""
        line = self._tail.rpartition("\n")[2]
        return not self._code and _IN_WORDS.match(line) is not None and "|" not in line and line[-1] not in _OPEN

    def highlight_code(self) -> bool:
        """Let the next `lines` colour all code; return whether any has no colours."""
        rough = self._rough
        # Text that was appended since the last layout may be code: without `_code`, `lines` colours it, too.
        if rough or self._tail_lines is None:
            self._code = None
            self._tail_lines = None
        return rough

    def lines(self, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
        """Return all lines at this width. The caller may keep the list, but not change it."""
        if (width, (ansi, dark)) != (self._width, self._colours):
            self._width = width
            self._colours = (ansi, dark)
            self._finished_lines = []
            self._before = []
            self._code = None
            for source in self._finished:
                self._finish(parser().parse(source))
            self._tail_lines = None
        if self._tail_lines is None:
            lines = self._with_code_added() or self._tail_laid_out()
            # Only now: `_tail_laid_out` may have removed lines of finished blocks from `_before`.
            self._tail_lines = _reusing(self._before, lines)
            self._before = self._tail_lines
        between = [BLANK] if self._finished_lines and self._tail_lines else []
        return [*self._finished_lines, *between, *self._tail_lines]

    def _tail_laid_out(self) -> list[Content]:
        """Parse the tail, move its finished blocks to the finished lines, and return the lines of the rest.

        `_tail` is shorter afterwards, if a block was finished. `_code` and `_rough` are of the new tail.
        """
        tokens = self._settled(parser().parse(self._tail))
        lines = self._laid_out(tokens)
        self._code = None
        self._rough = False
        # An open code block: it is the only block, it begins the tail without an indent, and its last line is neither
        # the opening fence nor like a closing one.
        if len(tokens) == 1 and tokens[0].type == "fence" and self._tail.startswith(tokens[0].markup):
            whole = self._tail.rstrip("\n")
            begin = whole.rfind("\n") + 1
            if begin and not _CLOSES_CODE.match(whole, begin):
                last = len(code_lines(whole[begin:], self._width))
                self._code = _OpenCode(self._tail[:begin], lines[: len(lines) - last])
        return lines

    def _with_code_added(self) -> list[Content] | None:
        """Return the tail's lines without colouring a grown code block again; None if it is no such block."""
        if self._code is None or not self._tail.startswith(self._code.source):
            return None
        added = self._tail[len(self._code.source) :]
        if _CLOSES_CODE.search(added):
            return None
        self._rough = True
        return [*self._code.lines, *code_lines(added, self._width)]

    def _settled(self, tokens: list["Token"]) -> list["Token"]:
        """Move finished blocks of the tail, parsed as `tokens`, to the finished lines; return the remaining tokens.

        The last block is never finished. A block that it may still join is not finished either; there are two cases,
        below. `_finished`, `_finished_lines`, `_tail` and `_before` change together.
        """
        # Indexes of the tokens that begin the tail's blocks. `last` is the first block that stays in the tail.
        blocks = [index for index, token in enumerate(tokens) if token.level == 0 and token.map and token.nesting >= 0]
        last = len(blocks) - 1
        source = self._tail.split("\n")
        # The last line may still grow, and then belong to the block right above it: `#` is a heading below a paragraph,
        # `#tag` is a line of the paragraph. The last block may also begin a line earlier: `| x |` and `|-` are the head
        # of a table, `| x |` and `|- a` are lines of the paragraph. A blank line above the last block rules this out.
        if last > 0:
            begin = _first_line(tokens[blocks[last]])
            is_young = begin >= len(source) - 2  # the block begins in one of the last two lines
            if is_young and source[begin - 1].strip():
                last -= 1
        # A list may be joined across a blank line: `2` below it is a paragraph, `2. b` is an item of it.
        if last > 0 and tokens[blocks[last - 1]].type in _LISTS:
            last -= 1
        if last >= 1:
            first = blocks[last]  # of the tokens that stay in the tail
            begin = _first_line(tokens[first])
            head = "\n".join(source[:begin]) + "\n"
            self._tail = "\n".join(source[begin:])
            self._finished.append(head)
            count = self._finish(tokens[:first])
            self._before = self._before[count + 1 :]  # a blank line follows them
            tokens = tokens[first:]
            # Token maps are line numbers: they now count from the start of the new tail.
            for token in tokens:
                if token.map:
                    token.map = [line - begin for line in token.map]
        return tokens

    def _finish(self, tokens: list["Token"]) -> int:
        """Append the lines of blocks to the finished lines; return their number, without the blank line before them."""
        lines = _reusing(self._before, self._laid_out(tokens))
        if self._finished_lines and lines:
            self._finished_lines.append(BLANK)
        self._finished_lines += lines
        return len(lines)

    def _laid_out(self, tokens: list["Token"]) -> list[Content]:
        ansi, dark = self._colours
        return render_tokens(tokens, self._width, ansi=ansi, dark=dark)


def _first_line(block: "Token") -> int:
    return block.map[0] if block.map else 0


def _reusing(old: list[Content], new: list[Content]) -> list[Content]:
    """Return `new` with the objects of `old` for equal lines at the same index.

    `RowStrips` has a drawn strip for each object, so only the other lines are drawn again.
    """
    for index, (before, line) in enumerate(zip(old, new, strict=False)):
        if before.is_same(line):
            new[index] = before
    return new
