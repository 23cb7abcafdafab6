"""The loop of the line chat: a prompt, a message or a slash command, until the end of the input.

Slash commands are those of the chat's table that need no screen. An action takes the chat and the command's argument,
and raises HeadraceError if it is not possible. A command of the table without a row in `ACTIONS` needs the full screen.
"""

import time
from collections.abc import Callable
from functools import partial

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
from headrace.app.chat.session_branch import new_session
from headrace.app.line_chat.chat import LineChat
from headrace.app.line_chat.terminal import PROMPT
from headrace.runtime.errors import HeadraceError, UsageError

_TWICE_S = 2.0  # within which a second Ctrl-C at the prompt leaves
_LISTED = 20  # sessions


def run_line_chat(chat: LineChat) -> None:
    """Load the model, then read and answer lines until Ctrl-D or /quit."""
    interrupted_at = float("-inf")
    _greet(chat)
    chat.answer(chat.conversation.load_model)
    while not chat.ended:
        try:
            _handle(chat, chat.terminal.read_message())
        except EOFError:
            chat.terminal.say("")
            return
        except KeyboardInterrupt:
            chat.terminal.say("")
            if time.monotonic() < interrupted_at + _TWICE_S:
                return
            interrupted_at = time.monotonic()
            chat.terminal.say("Ctrl-C again quits, and so does Ctrl-D")
        except HeadraceError as error:
            chat.show_error(error)


def _greet(chat: LineChat) -> None:
    say = chat.terminal.say
    say("headrace, line by line: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    if chat.conversation.store.unsaved is not None:
        say(chat.conversation.store.unsaved)
    session = chat.conversation.session
    if chat.conversation.messages:
        say(f"session {session.id}, {len(chat.conversation.messages)} messages; the last ones:")
        chat.show_end()
    if session.draft:
        say(f"typed before and not sent:\n{session.draft.whole}")


def _handle(chat: LineChat, text: str) -> None:
    """Carry out a line: a slash command, or a message to send. Raises HeadraceError."""
    invocation = parse_command(text)
    if invocation is not None:
        invocation.function(ACTIONS)(chat, invocation.rest)
    elif text.strip():
        chat.answer(lambda: chat.conversation.send(chat.attached + message_text(text)))
        chat.attached = ""


# -- actions -----------------------------------------------------------------------------------------------------------


def _help(chat: LineChat, _: str) -> None:
    for command in COMMANDS:
        if command.name in ACTIONS:
            chat.terminal.say(f"{command.usage}: {command.about}")
    chat.terminal.say("Lines pasted at once are one message. A leading // stands for one slash.")
    chat.terminal.say('A trailing \\ begins another line; so does Enter between """ and """.')
    chat.terminal.say("Ctrl-C stops an answer; Ctrl-D at the prompt ends.")


def _in_every_chat(name: str, chat: LineChat, argument: str) -> None:
    if text := IN_EVERY_CHAT[name](chat.conversation, argument):
        chat.terminal.say(text)


def _model(chat: LineChat, name: str) -> None:
    from headrace.app.chat.download_plan import check_model_name, download_plan  # late: many imports

    if not name:
        card = chat.conversation.engine.card
        chat.terminal.say(f"{card.name if card else 'no model is loaded'}; /model NAME takes another one")
        return
    check_model_name(name)
    plan = download_plan(name)
    if plan is None or chat.terminal.agreed(f"{plan.verb} {plan.name}? {plan.download}; {plan.room}"):
        chat.answer(lambda: chat.conversation.set_model(name))


def _think(chat: LineChat, _: str) -> None:
    chat.show_thinking = not chat.show_thinking
    chat.terminal.say(f"thinking is {'printed' if chat.show_thinking else 'left out'}")


def _file(chat: LineChat, path: str) -> None:
    """Keep a file for the next message."""
    line, what = attach(path)
    chat.attached += line
    chat.terminal.say(f"{what} attached to the next message")


def _edit(chat: LineChat, which: str) -> None:
    message = message_to_edit(chat.conversation, which)
    text = _new_text(chat, "text", message.content, message.content)
    if text is not None:
        chat.answer(lambda: chat.conversation.edit(message.id, text))


def _summary(chat: LineChat, what: str) -> None:
    if what == "undo":
        chat.terminal.say(undo_trimming(chat.conversation))
        return
    summary = summary_to_edit(chat.conversation)
    text = _new_text(chat, "summary", summary, summary or "no summary")
    if text is not None:
        chat.conversation.set_summary(text)


def _new_text(chat: LineChat, what: str, old: str, shown: str) -> str | None:
    """Show a text, and return the one typed in place of it; None if that is empty, the same or given up."""
    chat.terminal.say(f"{shown}\nType the new {what}; an empty line leaves it.")
    text = chat.terminal.read_or_leave(PROMPT)
    return None if text is None or not text.strip() or text == old else text


def _branch(chat: LineChat, direction: str) -> None:
    switch_branch(chat.conversation, direction)
    chat.show_end()


def _delete(chat: LineChat, _: str) -> None:
    last = last_message(chat.conversation)
    if chat.terminal.agreed("Remove the last message, for good?"):
        chat.conversation.remove(last.id)
        chat.show_end()


def _new(chat: LineChat, _: str) -> None:
    conversation = chat.conversation
    chat.conversation = conversation.open(new_session(conversation.store, conversation.session))
    chat.terminal.say("a new session")


def _sessions(chat: LineChat, _: str) -> None:
    for entry in chat.conversation.store.sessions(_LISTED):
        title = " ".join(entry.title.split()) or "empty"
        chat.terminal.say(f"{entry.session.id}: {title}, {entry.messages} messages")
    chat.terminal.say("`headrace --plain --resume ID` continues one")


def _search(chat: LineChat, words: str) -> None:
    from headrace.app.sessions.search import search

    if not words:
        raise UsageError("/search WORDS")
    hits = search(chat.conversation.store, words)
    for hit in hits:
        chat.terminal.say(f"{hit.session_id}, {hit.role}: {' '.join(hit.snippet.split())}")
    if not hits:
        chat.terminal.say("nothing found")


def _quit(chat: LineChat, _: str) -> None:
    chat.ended = True


ACTIONS: dict[str, Callable[[LineChat, str], None]] = {
    **{name: partial(_in_every_chat, name) for name in IN_EVERY_CHAT},
    "help": _help,
    "model": _model,
    "file": _file,
    "regen": lambda chat, _: chat.answer(chat.conversation.regenerate),
    "continue": lambda chat, _: chat.answer(chat.conversation.continue_answer),
    "edit": _edit,
    "summary": _summary,
    "branch": _branch,
    "delete": _delete,
    "new": _new,
    "sessions": _sessions,
    "search": _search,
    "think": _think,
    "restart": lambda chat, _: chat.answer(chat.conversation.restart_engine),
    "quit": _quit,
}
"""Actions by the names of their commands."""
