"""Separation of a reasoning model's thinking from its answer.

The section is `<think> ... </think>` at the beginning of the text; later tags are plain text. `ThinkingSplitter`
divides an answer that is being generated. `read_tags` divides a text from elsewhere: an answer that a killed headrace
stored, or that a person or another program wrote.

Guard: tests/models/text/test_thinking.py.
"""

from typing import NamedTuple

from msgspec import Struct

from headrace.models.text.stop_strings import half_length

OPEN = "<think>"
CLOSE = "</think>"
OPENING = f"{OPEN}\n"
"""Beginning of a section, where the model wrote none of its own."""
CLOSING = f"\n{CLOSE}\n\n"
"""End of such a section."""
LEVELS = ("low", "medium", "high")
Thinking = bool | int | str
"""Thinking on or off, its budget in tokens, or one of LEVELS."""


class Kinds(NamedTuple):
    """Lengths of the parts of an answer's text, in order. opening, closing: tags, with the line ends next to them."""

    opening: int = 0
    thinking: int = 0
    closing: int = 0
    content: int = 0


_NO_KINDS = Kinds()


class TextByKind(Struct, frozen=True):
    """An answer's text as the model wrote it, and its kinds. Text after them is of a kind that is not known yet."""

    text: str = ""
    kinds: Kinds = _NO_KINDS

    @property
    def thinking(self) -> str | None:
        """The thinking; None without a section."""
        begin = self.kinds.opening
        if begin == 0:  # every section begins with a tag in the text, also one that the template began
            return None
        return self.text[begin : begin + self.kinds.thinking].rstrip("\n")

    @property
    def content(self) -> str:
        """The answer after the thinking."""
        begin = sum(self.kinds[:3])
        return self.text[begin : begin + self.kinds.content]

    @property
    def is_open(self) -> bool:
        """True within a thinking section."""
        return self.kinds.opening > 0 and not self.kinds.closing

    def grown(self, text: str, more: Kinds) -> "TextByKind":
        """Return the text with more of it. more: lengths that are known now."""
        opening, thinking, closing, content = self.kinds
        if thinking:  # line ends in a section that is continued
            thinking += more.opening
        else:
            opening += more.opening
        kinds = Kinds(opening, thinking + more.thinking, closing + more.closing, content + more.content)
        return TextByKind(self.text + text, kinds)

    def ended(self) -> "TextByKind":
        """Return the whole text by kind: the rest is of the kind that it ends with."""
        rest = len(self.text) - sum(self.kinds)
        if self.is_open:
            return self.grown("", Kinds(thinking=rest))
        return self.grown("", Kinds(content=rest))


NO_TEXT = TextByKind()


def read_tags(text: str) -> TextByKind:
    """Return a whole text by kind, as its tags tell."""
    splitter = ThinkingSplitter()
    parts = splitter.by_kind(*splitter.finish(text))
    return TextByKind(text, Kinds(*map(len, parts))).ended()


class ThinkingSplitter:
    """Separation of a growing answer into its thinking section and the content after it.

    `feed` and `finish` divide the text at the end of the section, `by_kind` then the tags from both parts.
    """

    def __init__(self, *, thinks: bool = False) -> None:
        """thinks: the section has begun before the text."""
        self.has_section = thinks
        self.is_over = False  # all further text is content
        self._pending = ""  # half a tag
        # For `by_kind`.
        self._is_opened = thinks  # no opening tag to drop
        self._line_ends = ""  # after the thinking so far
        self._has_thinking = False
        self._has_content = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return the next text of the section, tags included, and of the content. Half a tag is held back."""
        if self.is_over:
            return "", text
        self._pending += text
        if not self.has_section:
            start = self._pending.lstrip()
            if start.startswith(OPEN):
                self.has_section = True
            elif OPEN.startswith(start):
                return "", ""
            else:
                self.is_over = True
                content = self._pending
                self._pending = ""
                return "", content
        before, tag, content = self._pending.partition(CLOSE)
        if tag:
            self.is_over = True
            self._pending = ""
            return before + tag, content
        end = len(self._pending) - half_length(self._pending, CLOSE)
        section = self._pending[:end]
        self._pending = self._pending[end:]
        return section, ""

    def finish(self, text: str) -> tuple[str, str]:
        """Return the last text as `feed` does, with half a tag that was held back."""
        section, content = self.feed(text)
        if self.has_section:
            section += self._pending
        else:
            content += self._pending
        self._pending = ""
        self.is_over = True
        return section, content

    def by_kind(self, section: str, content: str) -> tuple[str, str, str, str]:
        """Return the next opening, thinking, closing and content (see `Kinds`) of text that `feed` divided.

        Line ends after thinking are held back until it goes on or ends.
        """
        opening = ""
        if section and not self._is_opened:
            before, tag, section = section.partition(OPEN)
            opening = before + tag
            self._is_opened = True
        body, closing, _ = section.partition(CLOSE)
        thinking = self._line_ends + body
        if not self._has_thinking:
            opening += thinking[: len(thinking) - len(thinking.lstrip("\n"))]
            thinking = thinking.lstrip("\n")
        end = len(thinking.rstrip("\n"))
        self._line_ends = "" if closing else thinking[end:]
        if closing:
            closing = thinking[end:] + closing
        if self.has_section and not self._has_content:
            closing += content[: len(content) - len(content.lstrip("\n"))]
            content = content.lstrip("\n")
        self._has_thinking = self._has_thinking or end > 0
        self._has_content = self._has_content or content != ""
        return opening, thinking[:end], closing, content
