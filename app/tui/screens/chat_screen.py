"""The chat's screen: transcript, notice, completion menu, prompt and decode panel; its keys and messages.

Drawing is in `chat_view`, slash commands in `chat_actions`. Handlers named `on_WIDGET_MESSAGE` are called by textual
with the messages of the widgets in `compose`. tests/tui/test_chat.py goes through it key by key.
"""

import time
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import Screen

from headrace.app.chat.commands import TWICE_S, parse_command
from headrace.app.chat.conversation import DISK_FULL
from headrace.app.tui.decode.panel import ROOM_FROM, DecodePanel
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.input.search_bars import FindBar, HistoryBar, SearchBar
from headrace.app.tui.screens.chat_actions import ChatActions
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.screens.message_actions import copy_selection
from headrace.app.tui.screens.notices import Chips, Notice, QueuedMessages
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.app.tui.transcript.transcript import SCROLL_KEYS, Transcript
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.status_bar import StatusBar
from headrace.runtime.errors import HeadraceError


class ChatScreen(Screen[None]):
    """One conversation."""

    # In the order of the key bar. `do('NAME')` carries out a slash command. A new key needs a line of the help screen
    # (`_KEYS` there) and of docs/chat.md, too.
    BINDINGS: ClassVar[list[BindingType]] = [
        *SCROLL_KEYS,
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
        Binding("ctrl+b", "do('regen')", "Again"),
        Binding("ctrl+r", "search_history", "Search the history", show=False),
        Binding("ctrl+s", "do('compare')", "Compare", show=False),
        Binding("ctrl+g", "do('continue')", "Continue", show=False),
        Binding("ctrl+n", "do('new')", "New", show=False),
        Binding("ctrl+o", "do('copy')", "Copy", show=False),
        Binding("ctrl+t", "do('think')", "Thinking", show=False),
        Binding("f12", "do('guesses')", "Draft tokens", key_display="F12", show=False),
        Binding("ctrl+up", "to_transcript", "Messages", show=False),
        Binding("ctrl+f", "do('find')", "Find", show=False, priority=True),
    ]
    AUTO_FOCUS = "Prompt"

    def __init__(self, state: ChatState) -> None:
        # As most windows are: a change after the first layout would style all widgets again.
        super().__init__(classes="-high")
        use_partial_repaint(self)
        self.state = state
        self.view = ChatView(self, state)
        self.actions = ChatActions(self.view)
        self._interrupted = float("-inf")  # time of the last Ctrl+C with nothing to interrupt

    def compose(self) -> ComposeResult:
        metrics = self.state.metrics
        yield StatusBar(metrics, id="status")
        yield DecodePanel(metrics, self.state.settings.screen, id="panel")
        with Vertical(id="chat-column"):
            yield Transcript(id="transcript")
            yield Notice(id="notice", markup=False)
            yield QueuedMessages(id="queue", markup=False)
            yield Chips(id="chips")
            yield FindBar(id="find")
            yield HistoryBar(id="history")
            menu = CompletionMenu(id="menu")
            yield menu
            yield Prompt(menu, id="prompt")
        yield KeyBar()

    def on_mount(self) -> None:
        view = self.view
        view.prompt.remember(self.state.store.recent_questions())
        view.transcript.show_thinking = self.state.settings.chat.show_thinking
        view.conversation_changed()
        self.state.unsent = view.unsent

    # -- size ------------------------------------------------------------------------------------------------------

    def on_screen_resume(self) -> None:
        """Fit the panel: it was not drawn below another screen, and the window may have another size."""
        self._fit_panel(self.app.size)

    def on_resize(self, event: events.Resize) -> None:
        """Fit the panel before textual lays the screen out, also below a dialog."""
        self._fit_panel(event.size)
        if any(line.display for line in (*self.query(Notice), *self.query(QueuedMessages))):
            self.call_after_refresh(self.view.show_notices)  # fitted to the new width

    def _fit_panel(self, window: Size) -> None:
        self.view.panel.fit(window.width)
        self.view.update_status()
        self.view.show_metrics()

    # -- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            return self.state.conversation.phase != "idle" and self.view.editing is None
        if action == "leave_edit":
            return self.view.editing is not None
        if action == "do" and parameters == ("restart",):
            return self.state.engine.state in ("dead", "failed")
        return True

    def action_stop(self) -> None:
        self.state.conversation.stop()

    def action_leave_edit(self) -> None:
        self.view.end_edit()

    def action_interrupt(self) -> None:
        """Handle Ctrl+C: copy a selection, else stop the answer, else clear the prompt, else leave at the second."""
        prompt = self.view.prompt
        if copy_selection(self, self.state):
            return
        if self.state.conversation.phase != "idle":
            self.state.conversation.stop()
        elif prompt.text:
            if prompt.keep_draft():
                self.state.notify("draft kept: ↑ brings it back")
        elif time.monotonic() < self._interrupted + TWICE_S:
            self.run_command("quit", "")
        else:
            self._interrupted = time.monotonic()
            self.state.notify("Ctrl+C again quits")

    def action_do(self, name: str) -> None:
        self.run_command(name, "")

    def action_to_transcript(self) -> None:
        self.view.transcript.focus()
        self.view.transcript.action_select(-1)

    def action_search_history(self) -> None:
        history = self.view.prompt.recent_texts
        if history:
            self.query_one(HistoryBar).open(history)
        else:
            self.state.notify("the history is empty")

    def action_scroll_text(self, where: str) -> None:
        self.view.transcript.scroll_text(where)

    def action_panel(self) -> None:
        """Step to the panel's next width."""
        if self.app.size.width < ROOM_FROM:
            self.state.notify(f"the panel needs {ROOM_FROM} columns; F2 shows the decode view in full")
        else:
            self.view.panel.step()
            self.view.update_status()
            self.view.show_metrics()

    def focus_prompt_for(self, key: events.Key) -> None:
        """Focus the prompt before a letter that is no command of the focused widget."""
        if self.focused not in (None, self.view.transcript):
            return
        if key.is_printable and key.character is not None and key.key not in self.active_bindings:
            self.set_focus(self.view.prompt)

    def on_paste(self, event: events.Paste) -> None:
        """Paste into the prompt, wherever the focus is."""
        if not self.view.prompt.has_focus:
            event.stop()
            self.view.prompt.paste(event.text)

    # -- messages from the widgets ---------------------------------------------------------------------------------

    def run_command(self, name: str, argument: str) -> None:
        """Carry out a slash command; show its error as a notification."""
        self.state.attempt(lambda: self.actions.commands[name](argument))

    def on_text_area_changed(self) -> None:
        self.view.prefetch.typed()

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        if not self.send(event.text):
            self.view.prompt.restore(event.typed)

    def send(self, text: str) -> bool:
        """Send a message or carry out a command; show the error if that is refused.

        Return False for a refused message, which stays in the prompt. A refused command does not: the next one typed
        would join it. The history has it.
        """
        invocation = parse_command(text) if self.view.editing is None else None
        try:
            if invocation is None:
                self.actions.messages.send(text)
            else:
                self.actions.carry_out(invocation)
        except HeadraceError as error:
            self.state.show_error(error)
            self.view.asked.discard(DISK_FULL)  # it may be the cause
            return invocation is not None
        return True

    def on_prompt_sent_empty(self) -> None:
        """Fetch the model that the welcome text recommends, after a question."""
        card = self.state.engine.card
        if card is not None and card.recommended is not None and not self.state.conversation.messages:
            self.run_command("model", card.recommended.name)

    def on_prompt_interrupted(self) -> None:
        self.action_interrupt()

    async def on_prompt_end_of_input(self) -> None:
        await self.app.action_quit()

    def on_find_bar_search_requested(self, event: FindBar.SearchRequested) -> None:
        number, count = self.view.transcript.find(event.words, event.direction)
        self.view.find_bar.show_count(number, count)

    def on_search_bar_closed(self, event: SearchBar.Closed) -> None:
        if event.bar is self.view.find_bar:
            self.view.transcript.find("", 0)  # marks no match any more
        self.view.prompt.focus()

    def on_history_bar_taken(self, event: HistoryBar.Taken) -> None:
        self.view.prompt.recall(event.entry)

    def on_transcript_left(self) -> None:
        self.view.prompt.focus()

    def on_transcript_act(self, event: Transcript.Act) -> None:
        self.state.attempt(lambda: self.actions.act(event.action, event.message))
