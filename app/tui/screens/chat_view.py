"""What the actions of the chat work on: the chat's screen as they see it, and the conversation that it shows."""

from collections.abc import Sequence
from typing import Any, Protocol

from textual.app import App

from headrace.app.chat.conversation import Conversation
from headrace.app.chat.message_queue import MessageQueue
from headrace.app.engine.events import Event
from headrace.app.sessions.records import Message
from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.input.find_bar import FindBar
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.transcript.transcript import Transcript


class ChatView(Protocol):
    """What the actions need of the chat's screen."""

    editing: int | None
    """The message whose text is in the input to be changed."""

    @property
    def app(self) -> App[Any]: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def transcript(self) -> Transcript: ...

    @property
    def find_bar(self) -> FindBar: ...

    def sync(self, events: Sequence[Event]) -> None:
        """Draw what changed in the conversation."""

    def toggle_accepted(self) -> bool:
        """Mark what had been guessed in the answers, or no longer; whether it does now."""

    def begin_edit(self, message: Message) -> None:
        """Put its text into the input."""

    def action_leave_edit(self) -> None:
        """Done with it."""

    def run_command(self, name: str, argument: str) -> None:
        """Carry out a slash command; what it refuses is said, nothing breaks."""


class Actions:
    """A group of actions: one method a slash command, named `do_<command>`. Errors pass: the screen says them."""

    def __init__(self, headrace: ChatApp, screen: ChatView) -> None:
        self._headrace, self._screen = headrace, screen
        self.queue = MessageQueue()

    @property
    def _conversation(self) -> Conversation:
        return self._headrace.conversation
