"""The loop of the line chat: a prompt, a message or a command, until the end of the input."""

import time

from headrace.app.chat.commands import message_text, parse_command
from headrace.app.chat.continued_lines import begins_line, unquoted_lines, with_new_line
from headrace.app.line_chat.actions import LineActions
from headrace.app.line_chat.conversation import MORE, PROMPT, LineConversation
from headrace.app.line_chat.terminal import Lines
from headrace.runtime.errors import HeadraceError

_TWICE_S = 2.0  # within which a second Ctrl-C at the prompt leaves


def run_line_chat(chat: LineConversation) -> None:
    """Load the model, then read and answer lines until Ctrl-D or /quit."""
    actions = LineActions(chat)
    interrupted_at = float("-inf")
    _greet(chat)
    chat.load()
    while not actions.ended:
        try:
            _handle(chat, actions, _read(chat.lines))
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


def _read(lines: Lines) -> str:
    """Return the next message or command, of several lines after a backslash and within triple quotes."""
    text = lines.read(PROMPT)
    while begins_line(text):
        text = with_new_line(text) + lines.read(MORE)
    return unquoted_lines(text)


def _handle(chat: LineConversation, actions: LineActions, text: str) -> None:
    """Carry out a line: a slash command, or a message to send. Raises HeadraceError."""
    if (invocation := parse_command(text)) is not None:
        actions.carry_out(invocation)
    elif text.strip():
        chat.answer(lambda: chat.conversation.send(chat.attached + message_text(text)))
        chat.attached = ""


def _greet(chat: LineConversation) -> None:
    chat.say("headrace, line by line: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    if chat.store.unsaved is not None:
        chat.say(chat.store.unsaved)
    if count := len(chat.conversation.messages):
        chat.say(f"session {chat.conversation.session.id}, {count} messages; the last ones:")
        chat.show_end()
    if draft := chat.conversation.session.draft:
        chat.say(f"typed before and not sent:\n{draft.whole}")
