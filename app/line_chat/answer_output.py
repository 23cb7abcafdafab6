"""Output of a growing answer: appended as it comes, or as rendered Markdown with the last blocks drawn again.

`AnswerPrinter` takes the new text of an answer, and ends it with its figures.
"""

import shutil
import time
from math import ceil
from typing import Protocol

from headrace.app.answer.phrases import summary_phrases
from headrace.app.line_chat.terminal import Lines, say
from headrace.app.output.rendered_markdown import BLANK, RenderedLine, blocks_of, rendered_lines
from headrace.app.output.sanitise import Sanitiser
from headrace.app.sessions.records import Message

_ENDINGS = {"length": "limit reached", "cancelled": "stopped", "died": "the engine died", "failed": "failed"}
_WIDEST = 120  # cells of a line; longer ones are hard to read
_GROWING = 2  # last blocks that later text may change
_PAUSE = 4.0  # times a drawing took, until the next one: long code takes long


class AnswerOutput(Protocol):
    """Takes the sanitised text of an answer."""

    def write(self, text: str) -> None:
        """Add text."""
        ...

    def end(self) -> None:
        """End the line; other output may follow."""
        ...


class PlainOutput:
    """Appends text as it comes, and moves no cursor."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._at_line_start = True

    def write(self, text: str) -> None:
        self._at_line_start = text.endswith("\n")
        self._lines.write(text)

    def end(self) -> None:
        if not self._at_line_start:
            self._lines.write("\n")
        self._at_line_start = True


class MarkdownOutput:
    """Appends finished blocks, rendered. Below them are the growing ones, drawn again as text comes.

    Of growing blocks that are taller than the window only the last lines are drawn; all are, once they are finished.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._source = ""  # of the growing blocks
        self._drawn: list[RenderedLine] = []  # lines of them on the screen
        self._has_finished = False  # blocks stand above
        self._draws_at = 0.0  # earliest time of the next drawing

    def write(self, text: str) -> None:
        self._source += text
        begin = time.perf_counter()
        if begin < self._draws_at:
            return
        blocks = blocks_of(self._source)
        finished = self._rendered("".join(blocks[:-_GROWING]))
        if finished:
            self._source = "".join(blocks[-_GROWING:])
        self._has_finished = self._has_finished or bool(finished)
        height = shutil.get_terminal_size().lines
        self._draw(finished, self._rendered(self._source)[-max(1, height - 2) :])
        end = time.perf_counter()
        self._draws_at = end + _PAUSE * (end - begin)

    def end(self) -> None:
        self._draw(self._rendered(self._source), [])
        self._source = ""
        self._has_finished = False
        self._draws_at = 0.0

    def _rendered(self, source: str) -> list[RenderedLine]:
        """Return the lines of blocks, after a blank line if others stand above."""
        columns = shutil.get_terminal_size().columns
        lines = rendered_lines(source, max(1, min(columns - 1, _WIDEST)))
        if lines and self._has_finished:
            lines.insert(0, BLANK)
        return lines

    def _draw(self, finished: list[RenderedLine], growing: list[RenderedLine]) -> None:
        """Replace the growing lines on the screen by finished ones, and draw the growing ones of now."""
        columns = shutil.get_terminal_size().columns
        rows = sum(max(1, ceil(line.cells / columns)) for line in self._drawn)  # a narrowed window has wrapped them
        erased = f"\x1b[{rows}A\r\x1b[J" if rows else ""
        self._lines.write(erased + "".join(f"{line.text}\n" for line in [*finished, *growing]))
        self._drawn = growing


class AnswerPrinter:
    """Prints the answers that come after `last`, and the continuation of `last` itself."""

    def __init__(self, lines: Lines, output: AnswerOutput, last: Message | None, *, show_thinking: bool) -> None:
        """Take the places to print to.

        lines: of remarks and figures.
        output: of the answer's text.
        last: the last message; its text is printed already.
        show_thinking: print thinking, too.
        """
        self._lines = lines
        self._output = output
        self._show_thinking = show_thinking
        self._sanitiser = Sanitiser()
        self._id: int | None = None
        self._count = 0  # characters that are printed
        if last is not None:
            self._id = last.id
            self._count = len(self._text(last))
        self._new = False

    def show(self, message: Message) -> None:
        """Print the new text of the message, if it is an answer."""
        if message.role != "assistant":
            return
        if message.id != self._id:
            self._id = message.id
            self._count = 0
        text = self._text(message)
        piece = text[self._count :]
        self._count = len(text)
        if piece:
            self._new = True
            self._output.write(self._sanitiser.feed(piece))

    def line(self, text: str) -> None:
        """Print a line between two parts of the answer."""
        self._output.end()
        say(self._lines, text)

    def end(self, message: Message | None) -> None:
        """End the answer, with its figures if it has any."""
        self._output.end()
        if message is None or message.id != self._id or not self._new:
            return
        facts: list[str] = []
        if message.metrics is not None:
            facts += summary_phrases(message.metrics)
        if message.finish_reason in _ENDINGS:
            facts.append(_ENDINGS[message.finish_reason])
        if facts:
            say(self._lines, f"({', '.join(facts)})")

    def _text(self, message: Message) -> str:
        """Return the answer as it is printed; text that is added to the answer only extends it."""
        answer = message.by_kind
        if answer.thinking is None:
            return answer.content
        text = "(thinking)\n"
        if self._show_thinking:
            text += answer.thinking
        if answer.is_open:
            return text
        if not text.endswith("\n"):
            text += "\n"
        return f"{text}(answer)\n{answer.content}"
