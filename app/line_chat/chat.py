"""A conversation on lines: streamed answers, notices and questions.

`loop.py` reads lines and calls actions of the `Conversation` through `LineChat.answer`, which polls it until the answer
is there. An `AnswerPrinter` prints each answer: it gets the last message of the branch at every poll. Everything that
both chats do is in `app.chat`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from headrace.app.answer.phrases import ENDINGS, summary_phrases
from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.context_trimming import ContextChoice
from headrace.app.chat.conversation import DISK_CHOICES, Conversation, DiskChoice
from headrace.app.engine.events import LoadProgress, one_line
from headrace.app.line_chat.terminal import PROMPT, LineTerminal
from headrace.app.output.plain_output import PlainOutput
from headrace.app.output.rendered_markdown import MarkdownOutput
from headrace.app.output.sanitise import Sanitiser
from headrace.app.sessions.records import Message
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.errors import HeadraceError

AnswerOutput = PlainOutput | MarkdownOutput
_POLL_S = 0.05  # between two polls: text appears within that time
# Next steps by the engine's state, after a failure.
_WAYS_OUT = {
    "failed": "/restart tries again, /model NAME takes another model",
    "dead": "the next message starts it again",
}


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
            _mark, words = ending
            facts.append(words)
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


class LineChat:
    """One conversation at a time.

    attached: `/file` lines for the next message.
    show_thinking: print thinking.
    ended: /quit was typed.
    """

    def __init__(
        self,
        conversation: Conversation,
        terminal: LineTerminal,
        *,
        output: Callable[[Callable[[str], None]], AnswerOutput] = PlainOutput,
        show_thinking: bool = False,
        progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(silent),
    ) -> None:
        """Take the parts of a chat.

        output: makes the output of an answer's text.
        progress: opens a sink for the reports of loading.
        """
        self.conversation = conversation  # /new replaces it, with the same engine and store
        self.terminal = terminal
        self.show_thinking = show_thinking
        self.attached = ""
        self.ended = False
        self._output = output
        self._progress = progress
        self._shown: str | None = None  # the latest notice

    @property
    def last(self) -> Message | None:
        """The last message of the branch."""
        messages = self.conversation.messages
        return messages[-1] if messages else None

    def close(self) -> None:
        """Store an unfinished answer and stop the engine. Raises SessionError if it cannot be stored."""
        try:
            self.conversation.close()
        finally:
            self.conversation.engine.close()

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, ask: Callable[[], object]) -> None:
        """Call `ask`, and print text until the model is loaded and no answer is written; Ctrl-C stops the answer."""
        self.conversation.poll()  # the engine may have died during the wait for a line
        self._show_notice()
        printer = self._printer(self.last)
        ask()
        self._follow(printer)
        printer.end(self.last)
        self._show_notice()
        try:
            self._ask_what_is_open()
        except HeadraceError as error:  # the engine may have died meanwhile
            self.show_error(error)

    def _printer(self, last: Message | None) -> AnswerPrinter:
        """Return a printer of what comes after the message `last`."""
        return AnswerPrinter(self.terminal, self._output(self.terminal.write), last, show_thinking=self.show_thinking)

    def _follow(self, printer: AnswerPrinter) -> None:
        """Print text until no answer is written and no model is loaded; Ctrl-C stops the answer."""
        conversation = self.conversation
        remarks = set[str]()
        self.terminal.interrupted()  # forgets an interrupt from before
        while True:
            interrupted = self._wait_for_model() or self.terminal.interrupted()
            conversation.poll()
            printer.show(self.last)
            if conversation.writer.repeats:
                remark = f"({REPEATS}; Ctrl-C stops it)"
            elif conversation.phase == "summarising":
                remark = "(summarising the oldest turns)"
            else:
                remark = ""
            if remark and remark not in remarks:
                remarks.add(remark)
                printer.remark(remark)
            if conversation.phase == "idle":
                if interrupted or conversation.engine.state != "loading":  # the model goes on loading after Ctrl-C
                    return
            elif interrupted:
                conversation.stop()
            time.sleep(_POLL_S)

    def _wait_for_model(self) -> bool:
        """Report the progress of a load until it is over; return whether Ctrl-C ended the wait."""
        conversation = self.conversation
        if conversation.engine.state != "loading":
            return False
        with self._progress() as progress:
            while conversation.engine.state == "loading":
                for event in conversation.poll():
                    if isinstance(event, LoadProgress):
                        progress(event.stage, event.done, event.total)
                if self.terminal.interrupted():
                    return True
                time.sleep(_POLL_S)
        return False

    # -- output and questions --------------------------------------------------------------------------------------

    def show_end(self) -> None:
        """Print the last question and its answer."""
        for message in self.conversation.messages[-2:]:
            if message.role == "user":
                self.terminal.say(PROMPT + message.content)
            else:
                printer = self._printer(None)
                printer.show(message)
                printer.end(message)

    def show_error(self, error: HeadraceError) -> None:
        self.terminal.say(one_line(str(error), error.hint))

    def _show_notice(self) -> None:
        """Print the conversation's notice and the way out of a failure, once."""
        conversation = self.conversation
        notice = conversation.notice
        if (failure := conversation.failure) is not None:
            notice = f"{failure}; {_WAYS_OUT[conversation.engine.state]}"
        if notice is not None and notice != self._shown:
            self.terminal.say(notice)
        self._shown = notice
        if conversation.trimming.returned is not None:
            conversation.trimming.returned = None
            self.terminal.say("the message was not sent")

    def _ask_what_is_open(self) -> None:
        """Ask about a full context and a full disk."""
        conversation = self.conversation
        question = conversation.trimming.question
        if question is not None:
            choice = self.terminal.choose(f"The context is full. {question.text}", question.answers)
            if choice is not None:
                self.answer(lambda: conversation.resolve(cast(ContextChoice, choice)))
        if conversation.store.db.full:
            path = conversation.store.db.path
            choice = self.terminal.choose(f"The disk is full: the sessions in {path} cannot be written.", DISK_CHOICES)
            if choice is not None:
                conversation.resolve_full_disk(cast(DiskChoice, choice))
