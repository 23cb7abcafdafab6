"""A conversation on lines: streamed answers, notices and questions."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.context_trimming import CONTEXT_CHOICES, ContextChoice
from headrace.app.chat.conversation import DISK_CHOICES, Conversation, DiskChoice
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import LoadProgress, one_line
from headrace.app.line_chat.answer_output import AnswerOutput, AnswerPrinter, PlainOutput
from headrace.app.line_chat.terminal import PROMPT, Lines, say
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.errors import HeadraceError, UsageError

_POLL_S = 0.05
_WAYS_OUT = {
    "failed": "/restart tries again, /model NAME takes another model",
    "dead": "the next message starts it again",
}


class LineChat:
    """One conversation at a time.

    attached: `/file` lines for the next message. show_thinking: print thinking. ended: /quit was typed.
    """

    def __init__(
        self,
        engine: ChatEngine,
        store: SessionStore,
        session: Session,
        lines: Lines,
        *,
        output: Callable[[Lines], AnswerOutput] = PlainOutput,
        show_thinking: bool = False,
        progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(silent),
        spec: ModelSpec = ModelSpec(),  # noqa: B008 - immutable
    ) -> None:
        """Take the parts of a chat.

        output: makes the output of an answer's text.
        show_thinking: print thinking, too.
        progress: opens a sink for the reports of loading.
        spec: see `Conversation`.
        """
        self.engine = engine
        self.store = store
        self.lines = lines
        self.show_thinking = show_thinking
        self.attached = ""
        self.ended = False
        self._output = output
        self._progress = progress
        self._shown: str | None = None  # the latest notice
        self.conversation = Conversation(engine, store, session, spec)

    # -- output and questions --------------------------------------------------------------------------------------

    @property
    def last(self) -> Message | None:
        """The last message of the branch."""
        messages = self.conversation.messages
        return messages[-1] if messages else None

    def say(self, text: str) -> None:
        """Print a line."""
        say(self.lines, text)

    def show_end(self) -> None:
        """Print the last question and its answer."""
        for message in self.conversation.messages[-2:]:
            if message.role == "user":
                self.say(PROMPT + message.content)
            else:
                printer = self._printer(None)
                printer.show(message)
                printer.end(message)

    def agreed(self, question: str) -> bool:
        """Ask a question that is answered by yes or no."""
        return self._choose(question, [("yes", "y", "yes"), ("no", "n", "no")]) == "yes"

    def _choose(self, question: str, answers: Sequence[tuple[str, str, str]]) -> str | None:
        """Ask until the key of one of `answers` (name, key, description) is typed. Return its name; None for Ctrl-C."""
        self.say(question)
        for _, key, description in answers:
            self.say(f"{key}: {description}")
        names = {key: name for name, key, _ in answers}
        while True:
            try:
                typed = self.lines.read(f"{' or '.join(names)}? ").strip().lower()
            except (KeyboardInterrupt, EOFError):
                self.say("")
                return None
            except UsageError:
                continue
            if typed in names:
                return names[typed]

    def show_error(self, error: HeadraceError) -> None:
        self.say(one_line(str(error), error.hint))

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

    def open(self, session: Session) -> None:
        """Continue with another session of the same model. Raises SessionError."""
        self.conversation.close()
        self.conversation = Conversation(self.engine, self.store, session, self.conversation.spec)

    def close(self) -> None:
        """Store an unfinished answer and stop the engine. Raises SessionError if it cannot be stored."""
        try:
            self.conversation.close()
        finally:
            self.engine.close()

    def _printer(self, last: Message | None) -> AnswerPrinter:
        """Return a printer of what comes after the message `last`."""
        return AnswerPrinter(self.lines, self._output(self.lines), last, show_thinking=self.show_thinking)

    def _follow(self, printer: AnswerPrinter) -> None:
        """Print text until no answer is written and no model is loaded; Ctrl-C stops the answer."""
        conversation = self.conversation
        notices = set[str]()
        self.lines.interrupted()  # forgets an interrupt from before
        while True:
            interrupted = self._wait_for_model() or self.lines.interrupted()
            conversation.poll()
            if self.last is not None:
                printer.show(self.last)
            remarks = {
                f"({REPEATS}; Ctrl-C stops it)": conversation.writer.repeats,
                "(summarising the oldest turns)": conversation.phase == "summarising",
            }
            for remark, applies in remarks.items():
                if applies and remark not in notices:
                    notices.add(remark)
                    printer.line(remark)
            if conversation.phase == "idle":
                if interrupted or self.engine.state != "loading":  # the model goes on loading after Ctrl-C
                    return
            elif interrupted:
                conversation.stop()
            time.sleep(_POLL_S)

    def _wait_for_model(self) -> bool:
        """Report the progress of a load until it is over; return whether Ctrl-C ended the wait."""
        if self.engine.state != "loading":
            return False
        with self._progress() as progress:
            while self.engine.state == "loading":
                for event in self.conversation.poll():
                    if isinstance(event, LoadProgress):
                        progress(event.stage, event.done, event.total)
                if self.lines.interrupted():
                    return True
                time.sleep(_POLL_S)
        return False

    def _show_notice(self) -> None:
        """Print the conversation's notice and the way out of a failure, once."""
        conversation = self.conversation
        notice = conversation.notice
        way_out = _WAYS_OUT.get(self.engine.state)
        if way_out is not None:
            notice = f"{(notice or 'the engine is not running').rstrip('.')}; {way_out}"
        if notice is not None and notice != self._shown:
            self.say(notice)
        self._shown = notice
        if conversation.trimming.returned is not None:
            conversation.trimming.returned = None
            self.say("the message was not sent")

    def _ask_what_is_open(self) -> None:
        """Ask about a full context and a full disk."""
        conversation = self.conversation
        question = conversation.trimming.question
        if question is not None:
            answers = [answer for answer in CONTEXT_CHOICES if answer[0] in question.choices]
            choice = self._choose(f"The context is full. {question.text}", answers)
            if choice is not None:
                self.answer(lambda: conversation.resolve(cast(ContextChoice, choice)))
        if self.store.db.full:
            path = self.store.db.path
            choice = self._choose(f"The disk is full: the sessions in {path} cannot be written.", DISK_CHOICES)
            if choice is not None:
                conversation.resolve_full_disk(cast(DiskChoice, choice))
