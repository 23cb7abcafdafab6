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
from headrace.app.engine.events import Delta, LoadProgress, Ready, Repeats, SlowFirstPass, one_line
from headrace.app.line_chat.terminal import PROMPT, LineTerminal
from headrace.app.output.plain_output import PlainOutput
from headrace.app.output.progress import stage_progress
from headrace.app.output.rendered_markdown import MarkdownOutput
from headrace.app.sessions.records import Message
from headrace.runtime.errors import HeadraceError, UsageError

_POLL_S = 0.05  # between two polls: text appears within that time
_TWICE_S = 2.0  # within which a second Ctrl-C at the prompt leaves
_LISTED = 20  # sessions
# Next steps by the engine's state, after a failure.
_WAYS_OUT = {
    "failed": "/restart tries again, /model NAME takes another model",
    "dead": "the next message starts it again",
}


class AnswerText:
    """Prints the text of answers, one after the other, and the figures of each at its end.

    shows_thinking: print the text of thinking, not its head alone.
    """

    def __init__(
        self, output: PlainOutput | MarkdownOutput, say: Callable[[str], None], *, shows_thinking: bool
    ) -> None:
        self.shows_thinking = shows_thinking
        self._output = output
        self._say = say
        self._thinks = False  # the latest text is thinking
        self._answer_id: int | None = None  # of the latest text; None after its end

    def begin(self, turn: Turn | None) -> None:
        """Await the text of a generation, which may go on with the thinking of an earlier part."""
        self._thinks = turn is not None and turn.continuing and turn.leaf.by_kind.is_open

    def interrupt(self) -> None:
        """End the line, so that other output may follow."""
        self._output.end()

    def add(self, answer_id: int | None, thinking: str | None, content: str) -> None:
        """Print a part of an answer.

        answer_id: of its message; None if that could not be stored.
        thinking: None for none.
        """
        if thinking is not None or content:
            self._answer_id = answer_id
        if thinking is not None:
            if not self._thinks:
                self._output.write("(thinking)\n")
            self._thinks = True
            if self.shows_thinking:
                self._output.write(thinking)
        if content:
            if self._thinks:
                self._output.end()
                self._output.write("(answer)\n")
            self._thinks = False
            self._output.write(content)

    def end(self, message: Message | None) -> None:
        """End the text, with its figures if it has any. message: another one if the answer was deleted."""
        self._output.end()
        answer_id = self._answer_id
        self._thinks = False
        self._answer_id = None
        if message is None or message.id != answer_id:
            return
        facts = []
        if message.metrics is not None:
            facts = summary_phrases(message.metrics)
        if (ending := ENDINGS.get(message.finish_reason or "")) is not None:
            _mark, words = ending
            facts.append(words)
        if facts:
            self._say(f"({', '.join(facts)})")


class LineChat:
    """One conversation at a time. A method with an `argument` is a command; it raises HeadraceError if refused."""

    def __init__(
        self,
        conversation: Conversation,
        terminal: LineTerminal,
        *,
        output: Callable[[Callable[[str], None]], PlainOutput | MarkdownOutput] = PlainOutput,
        show_thinking: bool = False,
    ) -> None:
        """Take the parts of a chat. output: makes the output of answers' text, from a function that appends text."""
        self.conversation = conversation  # /new replaces it, with the same engine and store
        self._terminal = terminal
        self._say = terminal.say
        self._text = AnswerText(output(terminal.write), terminal.say, shows_thinking=show_thinking)
        self._progress = stage_progress()  # of a load
        self._first_pass = FirstPassLog(lambda text: terminal.say(f"({text})"))
        self._attached = ""  # `/file` lines for the next message
        self._ended = False  # /quit was typed
        self._notice: str | None = None  # the latest that was printed

    def run(self) -> None:
        """Load the model, then read lines and carry them out until Ctrl-D or /quit."""
        interrupted_at = float("-inf")
        self._greet()
        self._answer(self.conversation.load_model)
        while not self._ended:
            try:
                self._carry_out(self._terminal.read_message())
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                self._say("")
                if time.monotonic() < interrupted_at + _TWICE_S:
                    return
                interrupted_at = time.monotonic()
                self._say("Ctrl-C again quits, and so does Ctrl-D")
            except HeadraceError as error:
                self._show_error(error)

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
        if conversation.store.unsaved is not None:
            self._say(conversation.store.unsaved)
        if conversation.messages:
            self._say(f"session {session.id}, {len(conversation.messages)} messages; the last ones:")
            self._show_end()
        if session.draft:
            self._say(f"typed before and not sent:\n{session.draft.whole}")

    def _carry_out(self, text: str) -> None:
        """Carry out a line: a slash command, or a message to send. Raises HeadraceError."""
        invocation = parse_command(text)
        if invocation is not None:
            invocation.function(ACTIONS)(self, invocation.rest)
        elif text.strip():
            self._answer(lambda: self.conversation.send(self._attached + message_text(text)))
            self._attached = ""

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, ask: Callable[[], object]) -> None:
        """Call `ask`, and print text until the model is loaded and no answer is written; Ctrl-C stops the answer."""
        self._catch_up()
        ask()
        self._follow()
        self._ask_what_is_open()

    def _catch_up(self) -> None:
        """Take in what came while a line was typed: the engine may have died. Nothing of it shares the next line."""
        self._poll()
        self._progress.clear()
        self._text.interrupt()
        self._show_notice()

    def _follow(self) -> None:
        """Print text until the model is loaded and no answer is written, and the figures and the notice then."""
        conversation = self.conversation
        self._text.begin(conversation.writer.active)
        self._terminal.interrupted()  # forgets an interrupt from before
        while True:
            interrupted = self._terminal.interrupted()
            self._poll()
            if conversation.phase != "idle":
                if interrupted:
                    conversation.stop()
            elif interrupted or conversation.engine.state != "loading":  # the model goes on loading after Ctrl-C
                break
            time.sleep(_POLL_S)
        self._progress.clear()
        self._text.end(next(reversed(conversation.messages), None))
        self._show_notice()

    def _poll(self) -> None:
        """Take in events of the engine: print an answer's text, and draw the progress of a load."""
        turn = self.conversation.writer.active  # before the poll, which may end it
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
                    self._text.interrupt()
                    self._say(f"({REPEATS}; Ctrl-C stops it)")
                case Delta() if turn is not None and event.id == turn.id and not turn.summarising:
                    self._progress.clear()
                    answer_id = None
                    if turn.answer is not None:
                        answer_id = turn.answer.id
                    thinking = None
                    if event.kinds.opening or event.thinking:
                        thinking = event.thinking
                    self._text.add(answer_id, thinking, event.content)

    def _show_end(self) -> None:
        """Print the last question and its answer."""
        for message in self.conversation.messages[-2:]:
            if message.role == "user":
                self._say(PROMPT + message.content)
            else:
                text = message.by_kind
                self._text.add(message.id, text.thinking, text.content)
                self._text.end(message)

    # -- notices and questions -------------------------------------------------------------------------------------

    def _show_error(self, error: HeadraceError) -> None:
        self._say(one_line(str(error), error.hint))

    def _show_notice(self) -> None:
        """Print the conversation's notice and the way out of a failure, once."""
        conversation = self.conversation
        notice = conversation.notice
        if (failure := conversation.failure) is not None:
            notice = f"{failure}; {_WAYS_OUT[conversation.engine.state]}"
        if notice is not None and notice != self._notice:
            self._say(notice)
        self._notice = notice
        if conversation.trimming.returned is not None:
            conversation.trimming.returned = None
            self._say("the message was not sent")

    def _ask_what_is_open(self) -> None:
        """Ask each open question once, and again after an answer that goes on."""
        asked = set[str]()  # titles
        while unasked := [question for question in self.conversation.questions if question.title not in asked]:
            question = unasked[0]
            asked.add(question.title)
            choice = self._terminal.choose(f"{question.title.capitalize()}. {question.text}", question.answers)
            if choice is None:
                continue
            self._catch_up()
            try:
                question.resolve(choice)
            except HeadraceError as error:
                self._show_error(error)
                continue
            if choice == "new":
                self._say("a new session")
            if self.conversation.phase == "summarising":
                self._say("(summarising the oldest turns)")
            if self.conversation.phase != "idle":
                asked.clear()
                self._follow()
            self._show_notice()

    def _new_text(self, what: str, old: str, shown: str) -> str | None:
        """Show a text, and return the one typed in place of it; None if that is empty, the same or given up."""
        self._say(f"{shown}\nType the new {what}; an empty line leaves it.")
        text = self._terminal.read_or_leave(PROMPT)
        if text is None or not text.strip() or text == old:
            return None
        return text

    # -- commands --------------------------------------------------------------------------------------------------

    def help(self, _argument: str) -> None:
        for command in COMMANDS:
            if command.name in ACTIONS:
                self._say(f"{command.usage}: {command.about}")
        self._say("Lines pasted at once are one message. A leading // stands for one slash.")
        self._say('A trailing \\ begins another line; so does Enter between """ and """.')
        self._say("Ctrl-C stops an answer; Ctrl-D at the prompt ends.")

    def ask(self, _argument: str, *, request: Callable[[Conversation], None]) -> None:
        self._answer(lambda: request(self.conversation))

    def in_every_chat(self, argument: str, *, name: str) -> None:
        if text := IN_EVERY_CHAT[name](self.conversation, argument):
            self._say(text)

    def model(self, argument: str) -> None:
        from headrace.app.chat.download_plan import check_model_name, download_plan  # late: many imports

        if not argument:
            loaded = "no model is loaded"
            if (card := self.conversation.engine.card) is not None:
                loaded = card.name
            self._say(f"{loaded}; /model NAME takes another one")
            return
        check_model_name(argument)
        plan = download_plan(argument)
        if plan is None or self._terminal.agreed(f"{plan.verb} {plan.name}? {plan.download}; {plan.room}"):
            self._answer(lambda: self.conversation.set_model(argument))

    def think(self, _argument: str) -> None:
        self._text.shows_thinking = not self._text.shows_thinking
        state = "printed" if self._text.shows_thinking else "left out"
        self._say(f"thinking is {state}")

    def file(self, argument: str) -> None:
        """Keep a file for the next message."""
        line, what = attach(argument)
        self._attached += line
        self._say(f"{what} attached to the next message")

    def edit(self, argument: str) -> None:
        message = message_to_edit(self.conversation, argument)
        text = self._new_text("text", message.content, message.content)
        if text is not None:
            self._answer(lambda: self.conversation.edit(message.id, text))

    def summary(self, argument: str) -> None:
        if argument == "undo":
            self._say(undo_trimming(self.conversation))
            return
        summary = summary_to_edit(self.conversation)
        text = self._new_text("summary", summary, summary or "no summary")
        if text is not None:
            self.conversation.set_summary(text)

    def branch(self, argument: str) -> None:
        switch_branch(self.conversation, argument)
        self._show_end()

    def delete(self, _argument: str) -> None:
        last = last_message(self.conversation)
        if self._terminal.agreed("Remove the last message, for good?"):
            self.conversation.remove(last.id)
            self._show_end()

    def new(self, _argument: str) -> None:
        conversation = self.conversation
        self.conversation = conversation.open(new_session(conversation.store, conversation.session))
        self._say("a new session")

    def sessions(self, _argument: str) -> None:
        for entry in self.conversation.store.sessions(_LISTED):
            title = " ".join(entry.title.split()) or "empty"
            self._say(f"{entry.session.id}: {title}, {entry.messages} messages")
        self._say("`headrace --plain --resume ID` continues one")

    def search(self, argument: str) -> None:
        from headrace.app.sessions.search import search

        if not argument:
            raise UsageError("/search WORDS")
        hits = search(self.conversation.store, argument)
        for hit in hits:
            self._say(f"{hit.session_id}, {hit.role}: {' '.join(hit.snippet.split())}")
        if not hits:
            self._say("nothing found")

    def quit(self, _argument: str) -> None:
        self._ended = True


ACTIONS: Mapping[str, Callable[[LineChat, str], None]] = {
    **{name: partial(LineChat.in_every_chat, name=name) for name in IN_EVERY_CHAT},
    "help": LineChat.help,
    "model": LineChat.model,
    "file": LineChat.file,
    "regen": partial(LineChat.ask, request=Conversation.regenerate),
    "continue": partial(LineChat.ask, request=Conversation.continue_answer),
    "edit": LineChat.edit,
    "summary": LineChat.summary,
    "branch": LineChat.branch,
    "delete": LineChat.delete,
    "new": LineChat.new,
    "sessions": LineChat.sessions,
    "search": LineChat.search,
    "think": LineChat.think,
    "restart": partial(LineChat.ask, request=Conversation.restart_engine),
    "quit": LineChat.quit,
}
"""Actions by the names of their commands."""
