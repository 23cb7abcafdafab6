"""Slash commands of the line chat: those of the chat's table that need no screen."""

from collections.abc import Callable

from headrace.app.chat.attachments import parse_message, unquoted
from headrace.app.chat.command_actions import (
    message_to_edit,
    preset_names,
    set_parameter,
    set_schema,
    set_system,
    switch_branch,
    undo_trimming,
    use_preset,
)
from headrace.app.chat.commands import COMMANDS, Invocation, unknown_command
from headrace.app.chat.parameters import PARAMETERS, write_parameter
from headrace.app.line_chat.conversation import PROMPT, LineConversation
from headrace.app.line_chat.questions import agreed
from headrace.runtime.errors import UsageError

_LISTED = 20  # sessions


class LineActions:
    """ended: /quit was typed."""

    def __init__(self, chat: LineConversation) -> None:
        self.ended = False
        self._chat = chat
        self._actions: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "schema": lambda text: chat.say(set_schema(chat.conversation, text)),
            "preset": self._preset,
            "file": self._file,
            "regen": lambda _: chat.answer(lambda: chat.conversation.regenerate()),
            "continue": lambda _: chat.answer(lambda: chat.conversation.continue_answer()),
            "edit": self._edit,
            "summary": self._summary,
            "branch": self._branch,
            "delete": self._delete,
            "new": self._new,
            "sessions": self._sessions,
            "search": self._search,
            "rename": self._rename,
            "export": self._export,
            "think": self._think,
            "restart": lambda _: chat.restart(),
            "quit": self._quit,
        }

    def carry_out(self, invocation: Invocation) -> None:
        """Carry out a slash command. Raises HeadraceError, for one that is unknown or needs a screen, too."""
        if invocation.command is None:
            raise unknown_command(invocation.name)
        action = self._actions.get(invocation.command.name)
        if action is None:
            raise UsageError(f"/{invocation.name} needs the chat on a full screen", "/help lists the others")
        argument = invocation.argument
        if invocation.command.needs_argument and not argument:
            raise UsageError(f"/{invocation.name} {invocation.command.argument}")
        action(argument)

    def _help(self, _: str) -> None:
        for command in COMMANDS:
            if command.name in self._actions:
                self._chat.say(f"/{command.name} {command.argument}".rstrip() + f": {command.about}")
        self._chat.say("Lines pasted at once are one message. A leading // stands for one slash.")
        self._chat.say('A trailing \\ begins another line; so does Enter between """ and """.')
        self._chat.say("Ctrl-C stops an answer; Ctrl-D at the prompt ends.")

    # -- model and settings ----------------------------------------------------------------------------------------

    def _model(self, name: str) -> None:
        from headrace.app.chat.download_plan import download_plan
        from headrace.app.chat.model_names import check_model_name  # its imports would delay the first prompt

        chat = self._chat
        if not name:
            card = chat.engine.card
            chat.say(f"{card.name if card else 'no model is loaded'}; /model NAME takes another one")
            return
        check_model_name(name)
        plan = download_plan(name)
        if plan is None or agreed(chat.lines, f"{plan.verb} {plan.name}? {plan.download}; {plan.room}"):
            chat.conversation.set_model(name)
            chat.wait()

    def _system(self, text: str) -> None:
        if text:
            self._chat.say(set_system(self._chat.conversation, text))
        else:
            self._chat.say(f"system prompt: {self._chat.conversation.session.system or 'none'}")
            self._set("")

    def _set(self, assignment: str) -> None:
        if assignment:
            self._chat.say(set_parameter(self._chat.conversation, assignment))
            return
        effective = self._chat.conversation.effective
        for parameter in PARAMETERS:
            value = write_parameter(parameter.name, effective)
            self._chat.say(f"{parameter.name}: {value or 'not set'} ({parameter.help}; {parameter.range})")

    def _preset(self, argument: str) -> None:
        if argument:
            self._chat.say(use_preset(self._chat.conversation, argument))
        else:
            self._chat.say(f"presets: {', '.join(preset_names()) or 'none; /preset save NAME keeps these settings'}")

    # -- messages --------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> None:
        """Keep a file for the next message."""
        line = f"/file {path}\n"
        _, attachments = parse_message(line)
        self._chat.attached += line
        what = attachments[0].name if len(attachments) == 1 else f"{len(attachments)} files"
        self._chat.say(f"{what} attached to the next message")

    def _edit(self, which: str) -> None:
        chat = self._chat
        message = message_to_edit(chat.conversation, which)
        chat.say(message.content)
        text = self._read_new("the new text", message.content)
        if text is not None:
            chat.answer(lambda: chat.conversation.edit(message.id, text))

    def _summary(self, what: str) -> None:
        chat = self._chat
        conversation = self._chat.conversation
        if what == "undo":
            chat.say(undo_trimming(conversation))
        elif not conversation.branch.not_sent:
            raise UsageError("all messages are sent: there is no summary")
        else:
            chat.say(conversation.session.summary or "no summary")
            if (text := self._read_new("the new summary", conversation.session.summary)) is not None:
                conversation.set_summary(text)

    def _read_new(self, what: str, old: str) -> str | None:
        """Return the text typed in place of another one; None if it is empty, the same or given up."""
        self._chat.say(f"Type {what}; an empty line leaves it.")
        try:
            text = self._chat.lines.read(PROMPT)
        except (KeyboardInterrupt, EOFError):
            self._chat.say("")
            return None
        return text if text.strip() and text != old else None

    def _branch(self, direction: str) -> None:
        switch_branch(self._chat.conversation, direction)
        self._chat.show_end()

    def _delete(self, _: str) -> None:
        chat = self._chat
        if (last := chat.last) is None:
            raise UsageError("the conversation is empty")
        if agreed(chat.lines, "Remove the last message, for good?"):
            chat.conversation.remove(last.id)
            chat.show_end()

    # -- sessions --------------------------------------------------------------------------------------------------

    def _new(self, _: str) -> None:
        chat = self._chat
        was = self._chat.conversation.session
        chat.open(chat.store.create(model=was.model, system=was.system, sampling=was.sampling))
        chat.say("a new session")

    def _sessions(self, _: str) -> None:
        for entry in self._chat.store.sessions(_LISTED):
            self._chat.say(f"{entry.session.id}: {' '.join(entry.title.split()) or 'empty'}, {entry.messages} messages")
        self._chat.say("`headrace --plain --resume ID` continues one")

    def _search(self, words: str) -> None:
        from headrace.app.sessions.search import search

        if not words:
            raise UsageError("/search WORDS")
        hits = search(self._chat.store, words)
        for hit in hits:
            self._chat.say(f"{hit.session_id}, {hit.role}: {' '.join(hit.snippet.split())}")
        if not hits:
            self._chat.say("nothing found")

    def _rename(self, title: str) -> None:
        self._chat.conversation.branch.rename(title)

    def _export(self, name: str) -> None:
        from headrace.app.sessions.export import write_export

        chat = self._chat
        chat.conversation.settle()
        chat.say(f"wrote {write_export(chat.store, chat.conversation.session.id, unquoted(name))}")

    # -- the chat --------------------------------------------------------------------------------------------------

    def _think(self, _: str) -> None:
        self._chat.show_thinking = not self._chat.show_thinking
        self._chat.say(f"thinking is {'printed' if self._chat.show_thinking else 'left out'}")

    def _quit(self, _: str) -> None:
        self.ended = True
