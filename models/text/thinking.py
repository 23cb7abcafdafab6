"""Separation of a reasoning model's thinking from its answer.

The section is `<think> ... </think>` at the beginning of the text; later tags are plain text. `split_thinking` takes
stored text as a whole, `ThinkingSplitter` an answer that is being generated.
"""

from dataclasses import dataclass

from headrace.models.text.half_mark import half_length

OPEN = "<think>"
CLOSE = "</think>"
LEVELS = ("low", "medium", "high")
Thinking = bool | int | str
"""Thinking on or off, its budget in tokens, or one of LEVELS."""


@dataclass(frozen=True, slots=True)
class Parts:
    """thinking: None without a section. is_open: the section has not ended yet."""

    thinking: str | None
    answer: str
    is_open: bool = False


def split_thinking(text: str, *, growing: bool = False) -> Parts:
    """Split `text`. While it is `growing`, half a tag at its end is left out of both parts."""
    start = text.lstrip()
    if not start.startswith(OPEN):
        if growing and OPEN.startswith(start):
            return Parts(None, "")
        return Parts(None, text)
    body = start[len(OPEN) :]
    thinking, tag, answer = body.partition(CLOSE)
    if tag:
        return Parts(thinking.strip("\n"), answer.lstrip("\n"))
    if growing:
        thinking = thinking[: len(thinking) - half_length(thinking, CLOSE)]
    return Parts(thinking.strip("\n"), "", is_open=True)


class ThinkingSplitter:
    """Separation of a growing answer into its thinking section and the content after it.

    `feed` and `finish` divide the text without loss. `without_tags` then drops the same as `split_thinking`.
    """

    def __init__(self, *, thinks: bool = False) -> None:
        """thinks: the section has begun before the text."""
        self.has_section = thinks
        self.is_over = False  # all further text is content
        self._held = ""
        self._is_opened = thinks  # no opening tag to drop
        self._line_ends = ""  # at the end of the thinking so far
        self._has_thinking = False
        self._has_content = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return the next text of the section, tags included, and of the content. Half a tag is held back."""
        if self.is_over:
            return "", text
        self._held += text
        if not self.has_section:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self.has_section = True
            elif OPEN.startswith(start):
                return "", ""
            else:
                self.is_over = True
                content = self._held
                self._held = ""
                return "", content
        before, tag, content = self._held.partition(CLOSE)
        if tag:
            self.is_over = True
            self._held = ""
            return before + tag, content
        end = len(self._held) - half_length(self._held, CLOSE)
        section = self._held[:end]
        self._held = self._held[end:]
        return section, ""

    def finish(self, text: str) -> tuple[str, str]:
        """Return the last text as `feed` does, with half a tag that was held back."""
        section, content = self.feed(text)
        if self.has_section:
            section += self._held
        else:
            content += self._held
        self._held = ""
        self.is_over = True
        return section, content

    def without_tags(self, section: str, content: str) -> tuple[str, str]:
        """Return the next thinking and content: the text that `feed` divided, without tags and line ends at them."""
        if section and not self._is_opened:
            section = section.lstrip().removeprefix(OPEN)
            self._is_opened = True
        thinking = self._line_ends + section.removesuffix(CLOSE)
        if not self._has_thinking:
            thinking = thinking.lstrip("\n")
        end = len(thinking.rstrip("\n"))
        self._line_ends = thinking[end:]  # dropped if the section ends here
        if self.has_section and not self._has_content:
            content = content.lstrip("\n")
        self._has_thinking = self._has_thinking or end > 0
        self._has_content = self._has_content or content != ""
        return thinking[:end], content


class ThinkingTags:
    """Tags around the thinking of a growing answer that came by kind, as a session stores it."""

    def __init__(self) -> None:
        self._is_open = False

    def add(self, thinking: str, content: str) -> str:
        """Return the next text of the answer, tags included."""
        text = ""
        if thinking:
            text = thinking if self._is_open else f"{OPEN}\n{thinking}"
            self._is_open = True
        if content:
            text += f"\n{CLOSE}\n\n{content}" if self._is_open else content
            self._is_open = False
        return text
