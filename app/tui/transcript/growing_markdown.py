"""Incremental Markdown: only the last block is parsed again when text arrives.

A top-level block is finished once another one has begun; its lines are kept until the width or theme changes. Code
added to a block has no colours until `highlight_code`.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from headrace.app.output.markdown_parser import parser
from headrace.app.tui.transcript.markdown_lines import BLANK, code_lines, render_tokens

if TYPE_CHECKING:
    from markdown_it.token import Token


_IN_WORDS = re.compile(r" {0,3}(?:(?:[-*+>]|\d+[.)]) +)?[*_\"'(]*[^\W\d_]")  # no heading, no code
_OPEN = "`*_~[]<>&\\!"  # characters whose meaning later ones may change
_LISTS = ("bullet_list_open", "ordered_list_open")
_CLOSES_CODE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _OpenCode:
    """A code block at the end of the text, coloured up to its last whole line."""

    source: str
    lines: list[Content]


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
        self._code: _OpenCode | None = None  # which the tail is
        self._rough = False  # the tail has code without colours
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
        if rough or self._tail_lines is None:
            self._code = None
            self._tail_lines = None
        return rough

    def lines(self, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
        """Return all lines at this width. The caller may keep the list, but not change it."""
        if (width, (ansi, dark)) != (self._width, self._look):
            self._width = width
            self._look = (ansi, dark)
            self._finished_lines = []
            self._before = []
            self._code = None
            for source in self._finished:
                self._finish(parser().parse(source))
            self._tail_lines = None
        if self._tail_lines is None:
            lines = self._with_code_added() or self._tail_laid_out()
            self._before = self._tail_lines = _reusing(self._before, lines)
        between = [BLANK] if self._finished_lines and self._tail_lines else []
        return [*self._finished_lines, *between, *self._tail_lines]

    def _tail_laid_out(self) -> list[Content]:
        tokens = self._settled(parser().parse(self._tail))
        lines = self._laid_out(tokens)
        self._code = None
        self._rough = False
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

        The last block is never finished. Neither is one that it may still join: a list, or the block right above the
        last line (or above the two lines of a table's head) while that line may grow (`#` begins a heading, `#tag` does
        not).
        """
        blocks = [index for index, token in enumerate(tokens) if token.level == 0 and token.map and token.nesting >= 0]
        last = len(blocks) - 1
        source = self._tail.split("\n")
        if last > 0 and (begin := _first_line(tokens[blocks[last]])) >= len(source) - 2 and source[begin - 1].strip():
            last -= 1
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
            for token in tokens:
                if token.map:
                    token.map = [line - begin for line in token.map]
        return tokens

    def _finish(self, tokens: list["Token"]) -> int:
        """Finish blocks; return their number of lines."""
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
    """Return `new` with the objects of `old` for equal lines: only others are drawn again."""
    for index, (before, line) in enumerate(zip(old, new, strict=False)):
        if before.is_same(line):
            new[index] = before
    return new
