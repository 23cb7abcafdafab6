"""Incremental Markdown: only the last block, and the last items of a list, are parsed again when text arrives.

A top-level block is finished once another one has begun; its lines are kept until the width or theme changes. Code
added to a block has no colours until `highlight_code`.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from headrace.app.tui.transcript.markdown_lines import BLANK, code_lines, parser, render_tokens
from headrace.app.tui.transcript.open_list import (
    LISTS,
    OpenList,
    continue_list,
    end_of_list,
    first_line,
    is_tight,
    shift_lines,
)

if TYPE_CHECKING:
    from markdown_it.token import Token


_IN_WORDS = re.compile(r" {0,3}(?:(?:[-*+>]|\d+[.)]) +)?[*_\"'(]*[^\W\d_]")  # no heading, no code
_OPEN = "`*_~[]<>&\\!"  # characters whose meaning later ones may change
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
        self._list: OpenList | None = None  # the list that the tail continues
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
            self._code, self._tail_lines = None, None
        return rough

    def lines(self, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
        """Return all lines at this width. The caller may keep the list, but not change it."""
        if (width, (ansi, dark)) != (self._width, self._look):
            self._width, self._look = width, (ansi, dark)
            self._reopen_list()
            self._finished_lines, self._before, self._code = [], [], None
            for source in self._finished:
                self._finish(parser().parse(source))
            self._tail_lines = None
        if self._tail_lines is None:
            lines = self._with_code_added() or self._tail_laid_out()
            self._before = self._tail_lines = _reusing(self._before, lines)
        between = [BLANK] if self._finished_lines and self._tail_lines and self._apart else []
        return [*self._finished_lines, *between, *self._tail_lines]

    @property
    def _apart(self) -> bool:
        """True if a blank line separates finished lines from the rest."""
        return self._list is None or not self._list.tight

    def _tail_laid_out(self) -> list[Content]:
        tokens = self._settled(parser().parse(self._tail))
        lines = self._laid_out(tokens)
        self._code, self._rough = None, False
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
        if self._list is not None:
            if tokens[0].type not in LISTS or (self._list.tight and not is_tight(tokens, self._tail)):
                self._reopen_list()
                return self._settled(parser().parse(self._tail))
            continue_list(self._list, tokens)
        blocks = [place for place, token in enumerate(tokens) if token.level == 0 and token.map and token.nesting >= 0]
        last = len(blocks) - 1
        source = self._tail.split("\n")
        if last > 0 and (begin := first_line(tokens[blocks[last]])) >= len(source) - 2 and source[begin - 1].strip():
            last -= 1
        if last > 0 and tokens[blocks[last - 1]].type in LISTS:
            last -= 1
        if last >= 1:
            first = blocks[last]  # of the tokens that stay in the tail
            begin = first_line(tokens[first])
            head, self._tail = "\n".join(source[:begin]) + "\n", "\n".join(source[begin:])
            self._finished.append((self._list.source if self._list else "") + head)
            self._move(tokens[:first], blank=True)
            self._list = None
            tokens = shift_lines(tokens[first:], begin)
        return self._items_settled(tokens)

    def _items_settled(self, tokens: list["Token"]) -> list["Token"]:
        """Move finished items of a list at the tail's start: all but the last whose first line is complete.

        An item on the last line may turn out not to be one (`-` begins an item, `--` continues the one before). Then
        blank lines before it do not make the list loose.
        """
        if not tokens or tokens[0].type not in LISTS:
            return tokens
        inside = tokens[: tokens.index(end_of_list(tokens))]
        items = [place for place, token in enumerate(inside) if token.type == "list_item_open" and token.level == 1]
        source = self._tail.split("\n")
        head, tight = tokens[0], is_tight(tokens, self._tail)
        if self._list is not None and not self._list.tight:
            tight = False
        elif tight is None:
            return tokens
        if first_line(tokens[items[-1]]) >= len(source) - 1:
            if not tight and (self._list is None or self._list.tight):
                return tokens
            items.pop()
        if len(items) < 2:
            return tokens
        begin = first_line(tokens[items[-1]])
        if source[0][:1].isspace() or source[begin][:1].isspace():  # the nesting depends on both
            return tokens
        number = int(head.attrs.get("start", 1)) + len(items) - 1 if head.type == "ordered_list_open" else None
        done = "\n".join(source[:begin]) + "\n"
        begins = len(self._finished_lines) if self._list is None else self._list.begins
        before = self._list.source if self._list is not None else ""
        self._move([head, *tokens[1 : items[-1]], end_of_list(tokens)], blank=not tight)
        self._tail = "\n".join(source[begin:])
        self._list = OpenList(before + done, begins, tight, number)
        tokens = [head, *shift_lines(tokens[items[-1] :], begin)]
        continue_list(self._list, tokens)
        return tokens

    def _reopen_list(self) -> None:
        """Let the tail begin with the whole list again."""
        if (opened := self._list) is not None:
            between = [BLANK] if self._apart else []
            self._before = [*self._finished_lines[opened.begins :], *between, *self._before]
            if opened.begins:
                self._before = self._before[1:]  # the blank line above the list
            del self._finished_lines[opened.begins :]
            self._tail, self._list = opened.source + self._tail, None

    def _move(self, tokens: list["Token"], *, blank: bool) -> None:
        """Finish the tail's first blocks. blank: a blank line follows them."""
        count = self._finish(tokens)
        self._before = self._before[count + blank :]

    def _finish(self, tokens: list["Token"]) -> int:
        """Finish blocks; return their number of lines."""
        lines = _reusing(self._before, self._laid_out(tokens))
        if self._finished_lines and lines and self._apart:
            self._finished_lines.append(BLANK)
        self._finished_lines += lines
        return len(lines)

    def _laid_out(self, tokens: list["Token"]) -> list[Content]:
        ansi, dark = self._look
        return render_tokens(tokens, self._width, ansi=ansi, dark=dark)


def _reusing(old: list[Content], new: list[Content]) -> list[Content]:
    """Return `new` with the objects of `old` for equal lines, so that their drawings stay valid."""
    for place, (before, line) in enumerate(zip(old, new, strict=False)):
        if before.is_same(line):
            new[place] = before
    return new
