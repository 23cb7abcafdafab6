"""Output of a growing answer with its thinking and figures.

`LineChat` makes an `AnswerPrinter` for each answer and calls `show` at every poll with the last message of the branch.
"""

from headrace.app.answer.phrases import ENDINGS, summary_phrases
from headrace.app.line_chat.terminal import LineTerminal
from headrace.app.output.plain_output import PlainOutput
from headrace.app.output.rendered_markdown import MarkdownOutput
from headrace.app.output.sanitise import Sanitiser
from headrace.app.sessions.records import Message

AnswerOutput = PlainOutput | MarkdownOutput


class AnswerPrinter:
    """Prints the answers that come after a message, and the continuation of this message itself."""

    def __init__(
        self, terminal: LineTerminal, output: AnswerOutput, last: Message | None, *, show_thinking: bool
    ) -> None:
        """Take the outputs.

        terminal: for remarks and figures.
        output: for the answer's text.
        last: the last message, whose text is printed already; None: nothing is.
        show_thinking: print thinking, too.
        """
        self._terminal = terminal
        self._output = output
        self._show_thinking = show_thinking
        self._sanitiser = Sanitiser()
        self._id = None if last is None else last.id  # of the message that `_printed` counts
        self._printed = 0 if last is None else len(self._text(last))  # characters of `_text`, thinking included
        self._is_new = False  # something was printed

    def show(self, message: Message | None) -> None:
        """Print the new text of the message, if it is an answer."""
        if message is None or message.role != "assistant":
            return
        if message.id != self._id:
            self._id = message.id
            self._printed = 0
        text = self._text(message)
        new = text[self._printed :]
        self._printed = len(text)
        if new:
            self._is_new = True
            self._output.write(self._sanitiser.feed(new))

    def remark(self, text: str) -> None:
        """Print a line between two parts of the answer."""
        self._output.end()
        self._terminal.say(text)

    def end(self, message: Message | None) -> None:
        """End the answer, with its figures if it has any."""
        self._output.end()
        if message is None or message.id != self._id or not self._is_new:
            return
        facts = [] if message.metrics is None else summary_phrases(message.metrics)
        ending = ENDINGS.get(message.finish_reason or "")
        if ending is not None:
            facts.append(ending[1])  # its words, without the mark
        if facts:
            self._terminal.say(f"({', '.join(facts)})")

    def _text(self, message: Message) -> str:
        """Return the answer as it is printed; text that is added to the answer only extends it.

        `show` depends on this: it prints what follows the first `_printed` characters.
        """
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
