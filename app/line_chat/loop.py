"""The loop of the line chat: a prompt, a message or a slash command, until the end of the input.

Slash commands are those of the chat's table that need no screen. An action takes the chat and the command's argument,
and raises HeadraceError if it is not possible.
"""

import time
from collections.abc import Callable

from headrace.app.chat.attachments import unquoted
from headrace.app.chat.commands import (
    COMMANDS,
    attach,
    export_session,
    last_message,
    message_text,
    message_to_edit,
    parse_command,
    preset_names,
    set_parameter,
    set_schema,
    set_system,
    summary_to_edit,
    switch_branch,
    undo_trimming,
    use_preset,
)
from headrace.app.chat.continued_lines import begins_line, unquoted_lines, with_new_line
from headrace.app.chat.parameters import PARAMETERS, write_parameter
from headrace.app.chat.session_branch import new_session
from headrace.app.line_chat.chat import LineChat
from headrace.app.line_chat.terminal import PROMPT, Lines
from headrace.runtime.errors import HeadraceError, UsageError

_MORE = ". "  # prompt of a message's further lines
_TWICE_S = 2.0  # within which a second Ctrl-C at the prompt leaves
_LISTED = 20  # sessions


def run_line_chat(chat: LineChat) -> None:
    """Load the model, then read and answer lines until Ctrl-D or /quit."""
    interrupted_at = float("-inf")
    _greet(chat)
    chat.answer(chat.conversation.load_model)
    while not chat.ended:
        try:
            _handle(chat, _read(chat.lines))
        except EOFError:
            chat.say("")
            return
        except KeyboardInterrupt:
            chat.say("")
            if time.monotonic() < interrupted_at + _TWICE_S:
                return
            interrupted_at = time.monotonic()
            chat.say("Ctrl-C again quits, and so does Ctrl-D")
        except HeadraceError as error:
            chat.show_error(error)


def _greet(chat: LineChat) -> None:
    chat.say("headrace, line by line: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    if chat.store.unsaved is not None:
        chat.say(chat.store.unsaved)
    session = chat.conversation.session
    if chat.conversation.messages:
        chat.say(f"session {session.id}, {len(chat.conversation.messages)} messages; the last ones:")
        chat.show_end()
    if session.draft:
        chat.say(f"typed before and not sent:\n{session.draft.whole}")


def _read(lines: Lines) -> str:
    """Return the next message or command, of several lines after a backslash and within triple quotes."""
    text = lines.read(PROMPT)
    while begins_line(text):
        text = with_new_line(text) + lines.read(_MORE)
    return unquoted_lines(text)


def _handle(chat: LineChat, text: str) -> None:
    """Carry out a line: a slash command, or a message to send. Raises HeadraceError."""
    invocation = parse_command(text)
    if invocation is not None:
        invocation.function(_ACTIONS)(chat, invocation.rest)
    elif text.strip():
        chat.answer(lambda: chat.conversation.send(chat.attached + message_text(text)))
        chat.attached = ""


def _help(chat: LineChat, _: str) -> None:
    for command in COMMANDS:
        if command.name in _ACTIONS:
            chat.say(f"{command.usage}: {command.about}")
    chat.say("Lines pasted at once are one message. A leading // stands for one slash.")
    chat.say('A trailing \\ begins another line; so does Enter between """ and """.')
    chat.say("Ctrl-C stops an answer; Ctrl-D at the prompt ends.")


# -- model and settings ------------------------------------------------------------------------------------------------


def _model(chat: LineChat, name: str) -> None:
    from headrace.app.chat.download_plan import check_model_name, download_plan  # late: many imports

    if not name:
        card = chat.engine.card
        chat.say(f"{card.name if card else 'no model is loaded'}; /model NAME takes another one")
        return
    check_model_name(name)
    plan = download_plan(name)
    if plan is None or chat.agreed(f"{plan.verb} {plan.name}? {plan.download}; {plan.room}"):
        chat.answer(lambda: chat.conversation.set_model(name))


def _system(chat: LineChat, text: str) -> None:
    if text:
        chat.say(set_system(chat.conversation, text))
    else:
        chat.say(f"system prompt: {chat.conversation.session.system or 'none'}")
        _set(chat, "")


def _set(chat: LineChat, assignment: str) -> None:
    if assignment:
        chat.say(set_parameter(chat.conversation, assignment))
        return
    effective = chat.conversation.effective
    for parameter in PARAMETERS:
        value = write_parameter(parameter.name, effective)
        chat.say(f"{parameter.name}: {value or 'not set'} ({parameter.help}; {parameter.range})")


def _preset(chat: LineChat, argument: str) -> None:
    if argument:
        chat.say(use_preset(chat.conversation, argument))
    else:
        chat.say(f"presets: {', '.join(preset_names()) or 'none; /preset save NAME keeps these settings'}")


def _think(chat: LineChat, _: str) -> None:
    chat.show_thinking = not chat.show_thinking
    chat.say(f"thinking is {'printed' if chat.show_thinking else 'left out'}")


# -- messages ----------------------------------------------------------------------------------------------------------


def _file(chat: LineChat, path: str) -> None:
    """Keep a file for the next message."""
    line, what = attach(path)
    chat.attached += line
    chat.say(f"{what} attached to the next message")


def _edit(chat: LineChat, which: str) -> None:
    message = message_to_edit(chat.conversation, which)
    chat.say(message.content)
    text = _read_new(chat, "the new text", message.content)
    if text is not None:
        chat.answer(lambda: chat.conversation.edit(message.id, text))


def _summary(chat: LineChat, what: str) -> None:
    conversation = chat.conversation
    if what == "undo":
        chat.say(undo_trimming(conversation))
        return
    summary = summary_to_edit(conversation)
    chat.say(summary or "no summary")
    text = _read_new(chat, "the new summary", summary)
    if text is not None:
        conversation.set_summary(text)


def _read_new(chat: LineChat, what: str, old: str) -> str | None:
    """Return the text typed in place of another one; None if it is empty, the same or given up."""
    chat.say(f"Type {what}; an empty line leaves it.")
    try:
        text = chat.lines.read(PROMPT)
    except (KeyboardInterrupt, EOFError):
        chat.say("")
        return None
    return text if text.strip() and text != old else None


def _branch(chat: LineChat, direction: str) -> None:
    switch_branch(chat.conversation, direction)
    chat.show_end()


def _delete(chat: LineChat, _: str) -> None:
    last = last_message(chat.conversation)
    if chat.agreed("Remove the last message, for good?"):
        chat.conversation.remove(last.id)
        chat.show_end()


# -- sessions ----------------------------------------------------------------------------------------------------------


def _new(chat: LineChat, _: str) -> None:
    chat.open(new_session(chat.store, chat.conversation.session))
    chat.say("a new session")


def _sessions(chat: LineChat, _: str) -> None:
    for entry in chat.store.sessions(_LISTED):
        chat.say(f"{entry.session.id}: {' '.join(entry.title.split()) or 'empty'}, {entry.messages} messages")
    chat.say("`headrace --plain --resume ID` continues one")


def _search(chat: LineChat, words: str) -> None:
    from headrace.app.sessions.search import search

    if not words:
        raise UsageError("/search WORDS")
    hits = search(chat.store, words)
    for hit in hits:
        chat.say(f"{hit.session_id}, {hit.role}: {' '.join(hit.snippet.split())}")
    if not hits:
        chat.say("nothing found")


def _quit(chat: LineChat, _: str) -> None:
    chat.ended = True


_ACTIONS: dict[str, Callable[[LineChat, str], None]] = {
    "help": _help,
    "model": _model,
    "system": _system,
    "set": _set,
    "schema": lambda chat, text: chat.say(set_schema(chat.conversation, text)),
    "preset": _preset,
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
    "rename": lambda chat, title: chat.conversation.branch.rename(title),
    "export": lambda chat, name: chat.say(
        export_session(chat.conversation, chat.conversation.session.id, unquoted(name))
    ),
    "think": _think,
    "restart": lambda chat, _: chat.answer(chat.conversation.restart_engine),
    "quit": _quit,
}
"""Actions by the names of their commands."""
