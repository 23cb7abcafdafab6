"""The chat: transcript, notice, completion menu, input, and the decode panel beside them.

Draws what the conversation says (`sync`, called with every poll) and passes on what the widgets say. What the keys do
is in `chat_keys`, what the slash commands do in `chat_actions`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size

from headrace.app.engine.events import Event, LoadProgress
from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.decode.machine import contention_text
from headrace.app.tui.decode.panel import ROOM_FROM, DecodePanel
from headrace.app.tui.input.chips import Chips
from headrace.app.tui.input.commands import message_text, parse_command
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.find_bar import FindBar
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.chat_actions import ChatActions
from headrace.app.tui.screens.chat_keys import ChatKeys
from headrace.app.tui.screens.notices import Notice, Waiting, notice_of
from headrace.app.tui.screens.prompt_prefetch import PromptPrefetch
from headrace.app.tui.transcript.context_mark import MARK
from headrace.app.tui.transcript.download import DownloadProgress
from headrace.app.tui.transcript.shown_branch import ShownBranch
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.transcript.welcome import welcome_lines
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.status_bar import StatusBar
from headrace.runtime.errors import HeadraceError, UsageError


class ChatScreen(ChatKeys):
    """One conversation."""

    def __init__(self, headrace: ChatApp) -> None:
        super().__init__(headrace)
        self.actions = ChatActions(headrace, self)
        self._branch = ShownBranch()
        self._titled = ""  # the input's frame
        self._state: tuple[object, ...] = ()
        self._asked = False
        self._marks_accepted = False
        self._download, self._looked_up = DownloadProgress(), False
        self._ahead = PromptPrefetch(self, self._read_ahead)

    def compose(self) -> ComposeResult:
        metrics = self.headrace.metrics
        yield StatusBar(metrics, id="status")
        with Horizontal(id="chat-row"):
            with Vertical(id="chat-column"):
                yield Transcript(id="transcript")
                yield Notice(id="notice", markup=False)
                yield Waiting(id="queue", markup=False)
                yield Chips(id="chips")
                yield FindBar(id="find")
                menu = CompletionMenu(id="menu")
                yield menu
                yield Prompt(menu, id="prompt")
            yield DecodePanel(metrics, self.headrace.settings.screen, id="panel")
        yield KeyBar()

    def on_mount(self) -> None:
        self.prompt.focus()
        self.prompt.remember(self.headrace.store.recent_questions())
        self.transcript.show_thinking = self.headrace.settings.chat.show_thinking
        self.conversation_changed()

    def on_screen_resume(self) -> None:
        """The panel was not drawn while another screen was on top, and the window may have another size."""
        self._fit_panel(self.app.size)

    def on_resize(self, event: events.Resize) -> None:
        """Every new size, also under a dialog; before textual lays the screen out for it."""
        self._fit_panel(event.size)
        if self.query(Notice) and self.query_one(Notice).display:
            self.call_after_refresh(self._show_notice)  # cut for the new width

    def _fit_panel(self, window: Size) -> None:
        self.query_one(DecodePanel).fit(window.width)
        self.update_status()
        self.headrace.draw_metrics(force=True)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def conversation_changed(self) -> None:
        """Another session: start over."""
        self._branch, self._asked, self.editing = ShownBranch(), False, None
        if self.actions.queue.texts:
            self.actions.return_queue()
        self.prompt.remember([message.content for message in self.conversation.messages if message.role == "user"])
        self.sync([])
        self.transcript.to_end()
        self._ahead.wait_for_pause()

    def sync(self, events: Sequence[Event]) -> None:
        """Draw what changed in the conversation."""
        conversation = self.conversation
        messages = self._branch.look(conversation)
        if events or messages != [entry.message for entry in self.transcript.entries]:
            message_states = self._branch.message_states(
                conversation, self.headrace.metrics, accepted=self._marks_accepted
            )
            self.transcript.show(messages, message_states)
        if conversation.trimming.returned is not None:
            returned, conversation.trimming.returned = conversation.trimming.returned, None
            self.prompt.move_cursor((0, 0))
            self.prompt.paste(returned)  # folded, if it is long
        if not self.actions.queue.send_next(conversation):
            self.actions.return_queue()
        self._name_prompt()
        self.prompt.show_size(conversation.unsent.counted if self.editing is None else None)
        self.query_one(Chips).show(conversation.unsent if self.prompt.text else None)
        limit = conversation.context_limit
        state = (
            conversation.phase == "idle",
            self.headrace.engine.state,
            conversation.notice,
            conversation.branch.shared,
            limit,
            bool(messages),
            self.editing,
            tuple(self.actions.queue.texts),
        )
        if state != self._state:
            self._state = state
            self._state_changed(empty=not messages)
            self._ahead.wait_for_pause()
        self._follow_loading(events, empty=not messages)
        if conversation.trimming.question is None or conversation.phase != "idle":
            self._asked = False
        elif not self._asked and not (self.prompt.text and self._ahead.typing):
            self._asked = True
            self.actions.ask_about_context()

    def toggle_accepted(self) -> bool:
        """Mark what had been guessed in the answers, or no longer; whether it does now."""
        self._marks_accepted = not self._marks_accepted
        conversation = self.conversation
        messages = self._branch.look(conversation)
        message_states = self._branch.message_states(conversation, self.headrace.metrics, accepted=self._marks_accepted)
        self.transcript.show(messages, message_states)
        return self._marks_accepted

    def extend_last_line(self) -> bool:
        """Show what was added to the answer, where its last line alone is another one."""
        messages = self.conversation.messages
        return bool(messages) and self.transcript.extend_last_line(messages[-1])

    def _follow_loading(self, events: Sequence[Event], *, empty: bool) -> None:
        """How far a model is that has to be fetched first."""
        download, state, now = self._download, self.headrace.engine.state, time.monotonic()
        progress = [event for event in events if isinstance(event, LoadProgress)]
        for event in progress:
            download.take(event, now)
        if progress and download.active and not self._looked_up:
            self._looked_up = True
            self.run_worker(self._look_up, thread=True)
        if state == "loading" and (download.look(now) or progress):
            if empty:
                self._show_welcome()
            self._show_notice()
        elif state != "loading" and self._looked_up:
            self._download, self._looked_up = DownloadProgress(), False

    def _look_up(self) -> None:
        """What the catalog knows of it; in a thread of its own, which may read files."""
        from headrace.app.chat.download_plan import download_plan

        download = self._download
        with suppress(HeadraceError, OSError):  # whoever loads it says so
            download.facts = download_plan(self.conversation.session.model)

    def _show_welcome(self) -> None:
        conversation = self.conversation
        lines = welcome_lines(self.headrace.engine, conversation.session, self._download, conversation.notice)
        self.transcript.welcome(lines)

    def update_status(self) -> None:
        """The line at the top. How fast the last answer came is said beside an answer, where the panel does not."""
        answered = any(message.role == "assistant" for message in self.conversation.messages)
        with_speed = answered and not self.query_one(DecodePanel).display
        self.query_one(StatusBar).tell(self.headrace.status(), with_speed=with_speed)

    def _state_changed(self, *, empty: bool) -> None:
        """Keys, hints and the notice follow the state."""
        self.refresh_bindings()
        self.update_status()
        self._show_notice()
        self.query_one(Waiting).tell(self.actions.queue.texts)
        if empty:
            self._show_welcome()

    def _name_prompt(self) -> None:
        """On the input's frame: what Enter and Escape mean, and who else wants the machine."""
        contention = self.headrace.metrics.contention
        said = [contention_text(contention)] if contention is not None else []
        if self.editing == MARK:
            said.insert(0, "the summary: Enter keeps it, Esc leaves it")
        elif self.editing is not None:
            said.insert(0, "editing: Enter makes a branch, Esc leaves it")
        elif self.conversation.phase != "idle":
            said.insert(0, "answering: Esc stops")
        title = " · ".join(said)
        if title != self._titled:
            self._titled = title
            self.prompt.border_title = Content(title)

    def _show_notice(self) -> None:
        text, error = notice_of(self.conversation, self._download)
        self.query_one(Notice).tell(text, error=error)

    def show_metrics(self, metrics: LiveMetrics, frozen: bool) -> None:
        """The decode panel, where it is open."""
        panel = self.query_one(DecodePanel)
        if panel.display:
            panel.show(metrics, frozen)

    def action_panel(self) -> None:
        """The panel's next width, or why there is none."""
        if self.app.size.width < ROOM_FROM:
            self.headrace.say(f"no room for the panel in under {ROOM_FROM} columns; F2 shows all of it")
        else:
            self.query_one(DecodePanel).step()
            self.update_status()
            self.headrace.draw_metrics(force=True)

    # -- the input -------------------------------------------------------------------------------------------------

    def on_text_area_changed(self) -> None:
        self._ahead.typed()

    def _read_ahead(self, pause: bool) -> None:
        """Let the engine count what is being typed and, in a pause, read what it will be asked."""
        if not pause and not self.prompt.text.strip():
            return
        text = self.prompt.whole_text
        if self.editing is None and self.headrace.comparison is None:  # which has the engine to itself
            draft = "" if parse_command(text) else message_text(text)
            read = pause and self.headrace.settings.chat.read_ahead
            self.conversation.prefetch(draft, count_only=not read)

    # -- messages from the widgets ---------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        invocation = parse_command(event.text) if self.editing is None else None
        try:
            if invocation is None:
                self.actions.send(event.text)
            elif invocation.command is None:
                raise UsageError(f"there is no command /{invocation.name}; F1 lists them")
            else:
                self.actions.carry_out(invocation.command.name, invocation.argument)
        except HeadraceError as error:
            self.prompt.restore(event.typed)
            self.headrace.refuse(error)

    def on_prompt_interrupted(self) -> None:
        self.action_interrupt()

    async def on_prompt_end_of_input(self) -> None:
        await self.app.action_quit()

    def on_find_bar_sought(self, event: FindBar.Sought) -> None:
        self.find_bar.tell(*self.transcript.find(event.words, event.by))

    def on_find_bar_closed(self) -> None:
        self.transcript.find("", 0)
        self.prompt.focus()

    def on_transcript_left(self) -> None:
        self.prompt.focus()

    def on_transcript_act(self, event: Transcript.Act) -> None:
        try:
            self.actions.act(event.action, event.message)
        except HeadraceError as error:
            self.headrace.refuse(error)
