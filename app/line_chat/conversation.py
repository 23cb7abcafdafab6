"""A conversation on lines: asking, streamed answers, notices, questions."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.conversation import Conversation
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import LoadProgress, one_line
from headrace.app.line_chat.answer_output import AnswerOutput, AnswerPrinter, PlainOutput
from headrace.app.line_chat.questions import ask_about_context, ask_about_disk
from headrace.app.line_chat.terminal import Lines, say
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.errors import HeadraceError

PROMPT = "> "
MORE = ". "
"""Prompt of a message's further lines."""
POLL_S = 0.05
_WAYS_OUT: Mapping[str, str] = {
    "failed": "/restart tries again, /model NAME takes another model",
    "dead": "the next message starts it again",
}


@contextmanager
def _silently() -> Iterator[Progress]:
    yield silent


class LineConversation:
    """One conversation at a time. attached: `/file` lines for the next message. show_thinking: print thinking."""

    def __init__(
        self,
        engine: ChatEngine,
        store: SessionStore,
        session: Session,
        lines: Lines,
        *,
        output: Callable[[Lines], AnswerOutput] = PlainOutput,
        show_thinking: bool = False,
        progress: Callable[[], AbstractContextManager[Progress]] = _silently,
        **load_options: Any,
    ) -> None:
        """Take the parts of a chat.

        output: makes the output of an answer's text.
        show_thinking: print thinking, too.
        progress: opens a sink for the reports of loading.
        load_options: `context`, `kv`, `activations` of `ModelSpec`.
        """
        self.engine = engine
        self.store = store
        self.lines = lines
        self.show_thinking = show_thinking
        self.attached = ""
        self._load_options = load_options
        self._output = output
        self._progress = progress
        self._shown: str | None = None  # the latest notice
        self.conversation = self._opened(session)

    @property
    def last(self) -> Message | None:
        """The last message of the branch."""
        messages = self.conversation.messages
        return messages[-1] if messages else None

    def say(self, text: str) -> None:
        """Print a line."""
        say(self.lines, text)

    def show_error(self, error: HeadraceError) -> None:
        self.say(one_line(str(error), error.hint))

    def answer(self, ask: Callable[[], object]) -> None:
        """Call `ask`, and print the answers that follow."""
        printer = self._printer()
        ask()
        self._follow(printer)

    def load(self) -> None:
        """Load the session's model, and wait for it; Ctrl-C ends the wait."""
        self.conversation.load_model()
        self.wait()

    def wait(self) -> None:
        """Print text until the model is loaded and no answer is written."""
        self._follow(self._printer())

    def restart(self) -> None:
        """Start the engine again, and wait for it. Raises EngineError."""
        self.conversation.notice = None
        self.engine.restart()
        self.wait()

    def open(self, session: Session) -> None:
        """Continue with another session of the same model. Raises SessionError."""
        self.conversation.close()
        self.conversation = self._opened(session)

    def show_end(self) -> None:
        """Print the last question and its answer."""
        for message in self.conversation.messages[-2:]:
            if message.role == "user":
                self.say(PROMPT + message.content)
            else:
                printer = self._printer_after(None)
                printer.show(message)
                printer.end(message)

    def close(self) -> None:
        """Store an unfinished answer and stop the engine. Raises SessionError if it cannot be stored."""
        try:
            self.conversation.close()
        finally:
            self.engine.close()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _opened(self, session: Session) -> Conversation:
        return Conversation(self.engine, self.store, session, **self._load_options)

    def _printer(self) -> AnswerPrinter:
        return self._printer_after(self.last)

    def _printer_after(self, last: Message | None) -> AnswerPrinter:
        return AnswerPrinter(self.lines, self._output(self.lines), last, show_thinking=self.show_thinking)

    def _follow(self, printer: AnswerPrinter) -> None:
        """Print text until no answer is written and no model is loaded; Ctrl-C stops the answer."""
        conversation = self.conversation
        told = set[str]()
        self.lines.interrupted()  # one that came before
        while True:
            interrupted = self._wait_for_model() or self.lines.interrupted()
            conversation.poll()
            if (last := self.last) is not None:
                printer.show(last)
            remarks = {
                f"({REPEATS}; Ctrl-C stops it)": conversation.writer.repeats,
                "(summarising the oldest turns)": conversation.phase == "summarising",
            }
            for remark in [text for text, true in remarks.items() if true and text not in told]:
                told.add(remark)
                printer.line(remark)
            if conversation.phase == "idle" and self.engine.state != "loading":
                break
            if interrupted:
                if conversation.phase == "idle":  # the model goes on loading
                    break
                conversation.stop()
            time.sleep(POLL_S)
        printer.end(self.last)
        self._show_notice()
        self._ask()

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
                time.sleep(POLL_S)
        return False

    def _show_notice(self) -> None:
        """Print the conversation's notice and the way out of a failure, once."""
        conversation = self.conversation
        state = self.engine.state
        notice = conversation.notice or ("the engine is not running" if state in _WAYS_OUT else None)
        if notice is not None and state in _WAYS_OUT:
            notice = f"{notice.rstrip('.')}; {_WAYS_OUT[state]}"
        if notice is not None and notice != self._shown:
            self.say(notice)
        self._shown = notice
        if conversation.trimming.returned is not None:
            conversation.trimming.returned = None
            self.say("the message was not sent")

    def _ask(self) -> None:
        """Ask about a full context and a full disk."""
        try:
            if self.conversation.trimming.question is not None:
                printer = self._printer()
                if ask_about_context(self.lines, self.conversation):
                    self._follow(printer)
            if self.store.db.full:
                ask_about_disk(self.lines, self.conversation)
        except HeadraceError as error:  # the engine may have died meanwhile
            self.show_error(error)
