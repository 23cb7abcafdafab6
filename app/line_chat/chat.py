"""The chat line by line: a loop over a `Conversation` that reads a line, carries it out, and prints the outcome.

`headrace chat` makes a `LineChat` for TERM=dumb and screen readers, or with --inline. Slash commands are those of the
chat's table (`app.chat.commands`): a row of `ACTIONS`, or a function in `IN_EVERY_CHAT` there. A command without either
needs the full screen. tests/app/line_chat/ has all of them over a scripted engine.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from headrace.app.answer.first_pass import FirstPassLog
from headrace.app.answer.phrases import ENDINGS, summary_phrases
from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.commands import (
    COMMANDS,
    IN_EVERY_CHAT,
    TWICE_S,
    attach,
    last_message,
    message_text,
    message_to_edit,
    parse_command,
    summary_to_edit,
    switch_branch,
    undo_trimming,
)
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.session_branch import new_session
from headrace.app.chat.turn import Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import LoadProgress, Ready, Repeats, SlowFirstPass, one_line
from headrace.app.line_chat.terminal import PROMPT, LineTerminal
from headrace.app.output.plain_output import PlainOutput
from headrace.app.output.progress import stage_progress
from headrace.app.output.rendered_markdown import MarkdownOutput
from headrace.models.text.thinking import NO_TEXT, TextByKind
from headrace.runtime.errors import HeadraceError, UsageError
from headrace.runtime.metrics.telemetry import Summary

_POLL_S = 0.05  # between two polls: text appears within that time
# Lines after a choice about a full context.
_CHOSEN = {"summarise": "(summarising the oldest turns)", "new": "a new session"}
_HELP_END = """\
Lines pasted at once are one message. A leading // stands for one slash.
A trailing \\ begins another line; so does Enter between \"\"\" and \"\"\".
Ctrl-C stops an answer; Ctrl-D at the prompt ends."""


class LineChat:
    """One conversation at a time.

    A method with an `argument` is a command: it returns the lines to show, or raises HeadraceError if it is refused.
    """

    def __init__(
        self,
        conversation: Conversation,
        terminal: LineTerminal,
        *,
        output: Callable[[Callable[[str], None]], PlainOutput | MarkdownOutput] = PlainOutput,
        show_thinking: bool = False,
    ) -> None:
        """Take the parts of a chat.

        output: makes the output of answers' text, from a function that appends text.
        show_thinking: print the text of thinking, not its head alone.
        """
        self.conversation = conversation  # /new replaces it, with the same engine and store
        self._terminal = terminal
        self._output = output(terminal.write)
        self._shows_thinking = show_thinking
        self._progress = stage_progress()  # of a load
        self._first_pass = FirstPassLog(lambda text: terminal.say(f"({text})"))
        self._attached = ""  # `/file` lines for the next message
        self._turn: Turn | None = None  # the latest one, until its figures are printed
        self._printed = NO_TEXT  # of that turn's text
        self._asked = set[str]()  # titles of open questions that were asked since the last answer or load
        self._notice: str | None = None  # the latest that was printed

    def run(self) -> None:
        """Load the model, then read lines and carry them out until Ctrl-D or /quit."""
        interrupted_at = float("-inf")
        self._greet()
        self._attempt(self.conversation.load_model)
        while True:
            try:
                self._ask_what_is_open()
                text = self._terminal.read_message()
                self._attempt(partial(self._carry_out, text))
            except EOFError:
                self._terminal.say("")
                return
            except KeyboardInterrupt:
                self._terminal.say("")
                if time.monotonic() < interrupted_at + TWICE_S:
                    return
                interrupted_at = time.monotonic()
                self._terminal.say("Ctrl-C again quits, and so does Ctrl-D")
            except UsageError as error:  # of a line that cannot be read
                self._say(one_line(str(error), error.hint))

    def close(self) -> None:
        """Store an unfinished answer and stop the engine. Raises SessionError if it cannot be stored."""
        try:
            self.conversation.close()
        finally:
            self.conversation.engine.close()

    def _greet(self) -> None:
        conversation = self.conversation
        session = conversation.session
        self._say("headrace, line by line: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
        self._say(conversation.store.unsaved)
        if conversation.messages:
            self._say(f"session {session.id}, {len(conversation.messages)} messages; the last ones:")
            self._show_end()
        if session.draft:
            self._say(f"typed before and not sent:\n{session.draft.whole}")

    # -- one line --------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], str | None]) -> None:
        """Carry out an action, and print its lines or its error, then the answer or the load that it started."""
        self._catch_up()
        engine = self.conversation.engine
        starts = engine.starts
        try:
            self._say(action())
        except HeadraceError as error:
            self._say(one_line(str(error), error.hint))
        # A load that Ctrl-C has left in the background is not waited for again.
        is_new_load = engine.starts != starts
        if is_new_load or self.conversation.phase != "idle":
            self._asked.clear()
        self._follow(awaits_load=is_new_load)

    def _carry_out(self, text: str) -> str | None:
        """Carry out a line: a slash command, or a message to send. Return the lines to show. Raises HeadraceError."""
        invocation = parse_command(text)
        if invocation is not None:
            return invocation.function(ACTIONS)(self, invocation.rest)
        if text.strip():
            self.conversation.send(self._attached + message_text(text))
            self._attached = ""
        return None

    def _ask_what_is_open(self) -> None:
        """Ask each open question once, and again after the next answer or load."""
        while unasked := [question for question in self.conversation.questions if question.title not in self._asked]:
            question = unasked[0]
            self._asked.add(question.title)
            choice = self._terminal.choose(f"{question.title.capitalize()}. {question.text}", question.answers)
            if choice is not None:
                self._attempt(partial(_resolve, question.resolve, choice))

    # -- the engine ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Take in what came while a line was typed: the engine may have died. Nothing of it shares the next line."""
        self._poll()
        self._end_lines()

    def _follow(self, *, awaits_load: bool) -> None:
        """Print text until no answer is written, and the model is loaded if `awaits_load`; Ctrl-C stops the answer."""
        conversation = self.conversation
        self._terminal.interrupted()  # forgets an interrupt from before
        while True:
            interrupted = self._terminal.interrupted()
            self._poll()
            if conversation.phase != "idle":
                if interrupted:
                    conversation.stop()
            elif interrupted or not awaits_load or conversation.engine.state != "loading":
                break  # after Ctrl-C the model goes on loading
            time.sleep(_POLL_S)
        self._end_lines()

    def _poll(self) -> None:
        """Take in events of the engine: print an answer's text, and draw the progress of a load."""
        turn = self.conversation.writer.active  # before the poll, which may end it
        if turn is not None and turn is not self._turn:
            self._turn = turn
            self._printed = turn.written  # of an answer that is continued
        for event in self.conversation.poll():
            match event:
                case LoadProgress():
                    self._progress(event.stage, event.done, event.total)
                case Ready():
                    self._progress.clear()
                    self._first_pass.begin()
                case SlowFirstPass():
                    self._first_pass.add(event.seconds)
                case Repeats():
                    self._print_growth()
                    self._output.end()
                    self._say(f"({REPEATS}; Ctrl-C stops it)")
        self._print_growth()

    # -- output ----------------------------------------------------------------------------------------------------

    def _say(self, text: str | None) -> None:
        """Print lines, if there are any."""
        if text:
            self._terminal.say(text)

    def _print_growth(self) -> None:
        """Print the text of the latest turn that is not printed yet, whether it could be stored or not."""
        if self._turn is not None and self._turn.written is not self._printed:
            self._progress.clear()
            self._print(self._turn.written, self._printed)
            self._printed = self._turn.written

    def _print(self, text: TextByKind, before: TextByKind = NO_TEXT) -> None:
        """Print the text of an answer. before: the part of it that is printed."""
        if text.thinking is not None:
            if before.thinking is None:
                self._output.write("(thinking)\n")
            if self._shows_thinking:
                self._output.write(text.thinking[len(before.thinking or "") :])
            if text.content and not before.content:
                self._output.end()
                self._output.write("(answer)\n")
        self._output.write(text.content[len(before.content) :])

    def _end_lines(self) -> None:
        """End progress and text, then print the figures of the answer and the notice, once."""
        self._progress.clear()
        self._output.end()
        turn = self._turn
        if turn is not None and turn.reason is not None:
            if turn.answer is not None or (turn.written.text and not turn.summarising):
                self._say(_figures(turn.metrics, turn.reason))
            self._turn = None
        conversation = self.conversation
        notice = conversation.notice
        if (failure := conversation.failure) is not None:
            notice = f"{failure}; {_way_out(conversation.engine)}"
        if notice != self._notice:
            self._say(notice)
        self._notice = notice
        if conversation.trimming.returned is not None:
            conversation.trimming.returned = None
            self._say("the message was not sent")

    def _show_end(self) -> None:
        """Print the last question and its answer."""
        for message in self.conversation.messages[-2:]:
            if message.role == "user":
                self._say(PROMPT + message.content)
            else:
                self._print(message.by_kind)
                self._output.end()
                self._say(_figures(message.metrics, message.finish_reason))

    # -- commands --------------------------------------------------------------------------------------------------

    def help(self, _argument: str) -> str:
        lines = [f"{command.usage}: {command.about}" for command in COMMANDS if command.name in ACTIONS]
        return "\n".join([*lines, _HELP_END])

    def in_every_chat(self, argument: str, *, name: str) -> str:
        return IN_EVERY_CHAT[name](self.conversation, argument)

    def model(self, argument: str) -> str | None:
        from headrace.app.chat.download_plan import download_plan  # late: many imports

        if not argument:
            loaded = "no model is loaded"
            if (card := self.conversation.engine.card) is not None:
                loaded = card.name
            if self.conversation.engine.is_remote:
                return loaded
            return f"{loaded}; /model NAME takes another one"
        self.conversation.check_model(argument)
        plan = download_plan(argument)
        if plan is None or self._terminal.agreed(f"{plan.verb} {plan.name}? {plan.download}; {plan.room}"):
            self.conversation.set_model(argument)
        return None

    def think(self, _argument: str) -> str:
        self._shows_thinking = not self._shows_thinking
        return "thinking is printed" if self._shows_thinking else "thinking is left out"

    def file(self, argument: str) -> str:
        """Keep a file for the next message."""
        line, what = attach(argument)
        self._attached += line
        return f"{what} attached to the next message"

    def edit(self, argument: str) -> None:
        message = message_to_edit(self.conversation, argument)
        text = self._new_text(message.content)
        if text is not None:
            self.conversation.edit(message.id, text)

    def summary(self, argument: str) -> str | None:
        if argument == "undo":
            return undo_trimming(self.conversation)
        text = self._new_text(summary_to_edit(self.conversation))
        if text is not None:
            self.conversation.set_summary(text)
        return None

    def _new_text(self, old: str) -> str | None:
        """Show a text, and return the one typed in its place; None to leave it."""
        self._say(old)
        self._say("Type the new text; an empty line leaves it.")
        text = self._terminal.read_or_leave(PROMPT)
        if text is None or not text.strip() or text == old:
            return None
        self._catch_up()
        return text

    def branch(self, argument: str) -> None:
        switch_branch(self.conversation, argument)
        self._show_end()

    def delete(self, _argument: str) -> None:
        last = last_message(self.conversation)
        if self._terminal.agreed("Remove the last message, for good?"):
            self.conversation.remove(last.id)
            self._show_end()

    def new(self, _argument: str) -> str:
        conversation = self.conversation
        self.conversation = conversation.open(new_session(conversation.store, conversation.session))
        return "a new session"

    def quit(self, _argument: str) -> None:
        raise EOFError  # ends `run`, as Ctrl-D does


def _resolve(resolve: Callable[[str], None], choice: str) -> str:
    """Carry out a choice about an open question, and return the line to show."""
    resolve(choice)
    return _CHOSEN.get(choice, "")


def _way_out(engine: ChatEngine) -> str:
    """Return the next step after a failure of the engine."""
    if engine.state == "dead":
        return "the next message starts it again"
    if engine.is_remote:  # a server's model stays
        return "/restart tries again"
    return "/restart tries again, /model NAME takes another model"


def _figures(metrics: Summary | None, reason: str | None) -> str:
    """Return the line below an answer: its figures, and the reason for its end if that is not `stop`."""
    facts = []
    if metrics is not None:
        facts = summary_phrases(metrics)
    if (ending := ENDINGS.get(reason or "")) is not None:
        _mark, words = ending
        facts.append(words)
    return f"({', '.join(facts)})" if facts else ""


ACTIONS: Mapping[str, Callable[[LineChat, str], str | None]] = {
    **{name: partial(LineChat.in_every_chat, name=name) for name in IN_EVERY_CHAT},
    "help": LineChat.help,
    "model": LineChat.model,
    "file": LineChat.file,
    "regen": lambda chat, _: chat.conversation.regenerate(),
    "continue": lambda chat, _: chat.conversation.continue_answer(),
    "edit": LineChat.edit,
    "summary": LineChat.summary,
    "branch": LineChat.branch,
    "delete": LineChat.delete,
    "new": LineChat.new,
    "think": LineChat.think,
    "restart": lambda chat, _: chat.conversation.restart_engine(),
    "quit": LineChat.quit,
}
"""Actions by the names of their commands."""
