"""What the keys of the chat do, wherever they are not a widget's own. What slash commands do is in `chat_actions`."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from headrace.app.chat.conversation import Conversation
from headrace.app.sessions.records import Message
from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.input.find_bar import FindBar
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.chat_actions import ChatActions
from headrace.app.tui.screens.scrolling import ScrollingScreen
from headrace.app.tui.transcript.transcript import Transcript
from headrace.runtime.errors import HeadraceError

_TWICE_S = 2.0  # within which a second Ctrl+C leaves


class ChatKeys(ScrollingScreen):
    """A screen with an input and a transcript.

    editing: the message whose text is in the input to be changed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", key_display="Esc"),
        Binding("escape", "leave_edit", "Leave edit", key_display="Esc"),
        Binding("ctrl+c", "interrupt", "Stop", show=False),
        Binding("f8", "do('restart')", "Restart engine", key_display="F8"),
        Binding("f1", "app.show_keys", "Help", key_display="F1"),
        Binding("f2", "app.decode_view", "Decode", key_display="F2"),
        Binding("f3", "panel", "Panel", key_display="F3"),
        Binding("f4", "do('sessions')", "Sessions", key_display="F4"),
        Binding("f5", "do('model')", "Model", key_display="F5"),
        Binding("f6", "do('set')", "Settings", key_display="F6"),
        Binding("f7", "app.freeze", "Freeze", show=False),
        Binding("f9", "do('editor')", "Editor", show=False),
        Binding("ctrl+r", "do('regen')", "Again"),
        Binding("ctrl+s", "do('compare')", "Compare", show=False),
        Binding("ctrl+g", "do('continue')", "Continue", show=False),
        Binding("ctrl+n", "do('new')", "New", show=False),
        Binding("ctrl+o", "do('copy')", "Copy", show=False),
        Binding("ctrl+t", "do('think')", "Thinking", show=False),
        Binding("f12", "do('guesses')", "Guesses", key_display="F12", show=False),
        Binding("ctrl+up", "to_transcript", "Messages", show=False),
        Binding("ctrl+f", "do('find')", "Find", show=False, priority=True),
    ]

    def __init__(self, headrace: ChatApp) -> None:
        super().__init__()
        self.headrace = headrace
        self.actions: ChatActions
        self.editing: int | None = None
        self._draft = ""  # what was in the input before
        self._interrupted = float("-inf")  # when, last, with nothing to interrupt

    @property
    def conversation(self) -> Conversation:
        return self.headrace.conversation

    # Widgets that are there as long as the screen is, and asked for with every look.

    @cached_property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    @cached_property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @cached_property
    def find_bar(self) -> FindBar:
        return self.query_one(FindBar)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            return self.conversation.phase != "idle" and self.editing is None
        if action == "leave_edit":
            return self.editing is not None
        if action == "do" and parameters == ("restart",):
            return self.headrace.engine.state in ("dead", "failed")
        return True

    def action_stop(self) -> None:
        """Stop the answer."""
        self.conversation.stop()

    def begin_edit(self, message: Message) -> None:
        """Put its text into the input; what was being written there comes back afterwards."""
        prompt = self.prompt
        if self.editing is None:
            self._draft = prompt.whole_text
        self.editing = message.id
        prompt.put(message.content)

    def action_leave_edit(self) -> None:
        """Done with it: the draft from before."""
        self.editing = None
        self.prompt.put(self._draft)

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection, else stop the answer, else put the draft aside, else say how to leave."""
        selected = self.get_selected_text()
        prompt = self.prompt
        if selected:
            self.headrace.copy(selected, "the selection")
            self.clear_selection()
        elif self.conversation.phase != "idle":
            self.conversation.stop()
        elif prompt.text:
            if prompt.keep_draft():
                self.headrace.say("put aside: ↑ brings it back")
        elif time.monotonic() < self._interrupted + _TWICE_S:
            self.actions.do_quit("")
        else:
            self._interrupted = time.monotonic()
            self.headrace.say("Ctrl+C again leaves")

    def action_do(self, name: str) -> None:
        self.run_command(name, "")

    def action_to_transcript(self) -> None:
        self.transcript.focus()
        self.transcript.action_select(-1)

    @property
    def scrolled(self) -> Sequence[Transcript]:
        return (self.transcript,)

    def meet(self, key: events.Key) -> None:
        """Before it goes anywhere: a letter that is no command where the keys are is meant for the input, as is all
        that comes behind it, however fast."""
        if self.focused not in (None, self.transcript):
            return
        if key.is_printable and key.character is not None and key.key not in self.active_bindings:
            self.set_focus(self.prompt)

    def on_paste(self, event: events.Paste) -> None:
        """As is what is pasted while the keys are elsewhere."""
        if not self.prompt.has_focus:
            event.stop()
            self.prompt.paste(event.text)

    def run_command(self, name: str, argument: str) -> None:
        """Carry out a slash command; what it refuses is said, nothing breaks."""
        try:
            self.actions.carry_out(name, argument)
        except HeadraceError as error:
            self.headrace.refuse(error)
