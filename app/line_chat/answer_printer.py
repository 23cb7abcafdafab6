"""The text of a growing answer for an output, and its figures as one line."""

from headrace.app.answer.phrases import summary_phrases
from headrace.app.line_chat.answer_output import AnswerOutput
from headrace.app.line_chat.terminal import Lines, say
from headrace.app.output.sanitise import Sanitiser
from headrace.app.sessions.records import Message
from headrace.models.text.thinking import split_thinking

_ENDINGS = {"length": "limit reached", "cancelled": "stopped", "died": "the engine died", "failed": "failed"}


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
        self._id = None if last is None else last.id
        self._count = 0 if last is None else len(self._text(last))  # characters that are printed
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
        facts = summary_phrases(message.metrics) if message.metrics is not None else []
        ending = _ENDINGS.get(message.finish_reason or "")
        if facts or ending:
            say(self._lines, f"({', '.join([*facts, *([ending] if ending else [])])})")

    def _text(self, message: Message) -> str:
        """Return the answer as it is printed; text that is added to the answer only extends it."""
        parts = split_thinking(message.content, growing=message.partial)
        if parts.thinking is None:
            return parts.answer
        thinking = f"(thinking)\n{parts.thinking if self._show_thinking else ''}"
        if parts.is_open:
            return thinking
        return f"{thinking}{'' if thinking.endswith(chr(10)) else chr(10)}(answer)\n{parts.answer}"
