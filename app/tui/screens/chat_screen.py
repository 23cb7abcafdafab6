"""The chat: transcript, notice, completion menu, input, and the decode panel beside them.

Draws what the conversation says (`sync`, called with every poll) and turns keys into calls. What the slash
commands do is in `chat_actions`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.timer import Timer
from textual.widgets import Static

from headrace.app.chat.conversation import Conversation
from headrace.app.engine.messages import Event, LoadProgress
from headrace.app.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.decode.machine import crowd_text
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.panel import ROOM_FROM, DecodePanel
from headrace.app.tui.input.chips import Chips
from headrace.app.tui.input.commands import message_text, parse_command
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.find_bar import FindBar
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.key_bar import KeyBar
from headrace.app.tui.screens.chat_actions import ChatActions
from headrace.app.tui.status_bar import StatusBar
from headrace.app.tui.textual_overrides.frugal_screen import FrugalScreen
from headrace.app.tui.transcript.context_mark import MARK
from headrace.app.tui.transcript.fetching import Fetching
from headrace.app.tui.transcript.shown_branch import ShownBranch
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.transcript.welcome import welcome_lines
from headrace.runtime.errors import HeadraceError, UsageError

_QUEUE_LINES = 3  # shown of the messages that wait
_NOTICE_LINES = 5  # more are cut off, which shows
_COUNT_S = 0.3  # between two counts of its tokens while keys come
_PAUSE_S = 0.25  # without a key, after which what stands in the input is worth reading
_TWICE_S = 2.0  # within which a second Ctrl+C leaves
_HANDS_OFF_S = 1.0  # without a key, after which a question with answers by letter may come up


class ChatScreen(FrugalScreen):
    """One conversation."""

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
        Binding("ctrl+up", "to_transcript", "Messages", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Page down", show=False, priority=True),
        Binding("ctrl+home", "head", "Top", show=False, priority=True),
        Binding("ctrl+end", "tail", "End", show=False, priority=True),
        Binding("ctrl+f", "do('find')", "Find", show=False, priority=True),
        Binding("ctrl+l", "redraw", "Draw anew", show=False, priority=True),
    ]

    def __init__(self, headrace: ChatApp) -> None:
        super().__init__()
        self.headrace = headrace
        self.actions = ChatActions(headrace, self)
        self._branch = ShownBranch()
        self._titled = ""  # the input's frame
        self._state: tuple[object, ...] = ()
        self._asked = False
        self._fetching, self._looked_up = Fetching(), False
        self._interrupted = float("-inf")  # when, last, with nothing to interrupt
        self._typed = float("-inf")  # when, last
        self._pause: Timer | None = None
        self._counting: Timer | None = None
        self.editing: int | None = None
        """The message whose text is in the input to be changed."""
        self._draft = ""  # what was in the input before

    @property
    def conversation(self) -> Conversation:
        return self.headrace.conversation

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def find_bar(self) -> FindBar:
        return self.query_one(FindBar)

    def compose(self) -> ComposeResult:
        metrics = self.headrace.metrics
        yield StatusBar(metrics, id="status")
        with Horizontal(id="chat-row"):
            with Vertical(id="chat-column"):
                yield Transcript(id="transcript")
                yield Static(id="notice", markup=False)
                yield Static(id="queue", markup=False)
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
        if self.query("#notice") and self.query_one("#notice").display:
            self.call_after_refresh(self._show_notice)  # cut for the new width

    def _fit_panel(self, window: Size) -> None:
        self.query_one(DecodePanel).fit(window.width)
        self.tell_status()
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
        self._wait_for_pause()

    def sync(self, events: Sequence[Event]) -> None:
        """Draw what changed in the conversation."""
        conversation = self.conversation
        messages = self._branch.look(conversation)
        if events or messages != [entry.message for entry in self.transcript.entries]:
            self.transcript.show(messages, self._branch.standings(conversation, self.headrace.metrics))
        if conversation.returned is not None:
            returned, conversation.returned = conversation.returned, None
            self.prompt.move_cursor((0, 0))
            self.prompt.paste(returned)  # folded, if it is long
        if not self.actions.queue.send_next(conversation):
            self.actions.return_queue()
        self._name_prompt()
        self.prompt.tell_size(conversation.draft.counted)
        self.query_one(Chips).show(conversation.draft if self.prompt.text else None)
        limit = conversation.context_limit
        state = (
            conversation.phase == "idle",
            self.headrace.engine.state,
            conversation.notice,
            conversation.shared,
            limit,
            bool(messages),
            self.editing,
            tuple(self.actions.queue.texts),
        )
        if state != self._state:
            self._state = state
            self._state_changed(empty=not messages)
            self._wait_for_pause()
        self._follow_loading(events, empty=not messages)
        if conversation.question is None or conversation.phase != "idle":
            self._asked = False
        elif not self._asked and not (self.prompt.text and time.monotonic() < self._typed + _HANDS_OFF_S):
            self._asked = True
            self.actions.ask_about_context()

    def type_on(self) -> bool:
        """Show what was added to the answer, where its last line alone is another one."""
        messages = self.conversation.messages
        return bool(messages) and self.transcript.type_on(messages[-1])

    def _follow_loading(self, events: Sequence[Event], *, empty: bool) -> None:
        """How far a model is that has to be fetched first."""
        fetching, state = self._fetching, self.headrace.engine.state
        progress = [event for event in events if isinstance(event, LoadProgress)]
        for event in progress:
            fetching.take(event, time.monotonic())
        if progress and fetching.active and not self._looked_up:
            self._looked_up = True
            self.run_worker(self._look_up, thread=True)
        if progress and state == "loading":
            if empty:
                self._show_welcome()
            self._show_notice()
        elif state != "loading" and self._looked_up:
            self._fetching, self._looked_up = Fetching(), False

    def _look_up(self) -> None:
        """What the catalog knows of it; in a thread of its own, which may read files."""
        from headrace.app.chat.to_fetch import to_fetch

        fetching = self._fetching
        with suppress(HeadraceError):  # whoever loads it says so
            fetching.facts = to_fetch(self.conversation.session.model)

    def _show_welcome(self) -> None:
        conversation = self.conversation
        lines = welcome_lines(self.headrace.engine, conversation.session, self._fetching, conversation.notice)
        self.transcript.welcome(lines)

    def tell_status(self) -> None:
        """The line at the top."""
        panel = self.query_one(DecodePanel)
        self.query_one(StatusBar).tell(self.headrace.status(), with_speed=not panel.display)

    def _state_changed(self, *, empty: bool) -> None:
        """Keys, hints and the notice follow the state."""
        self.refresh_bindings()
        self.tell_status()
        self._show_notice()
        self._show_queue()
        if empty:
            self._show_welcome()

    def _name_prompt(self) -> None:
        """On the input's frame: what Enter and Escape mean, and who else wants the machine."""
        crowd = self.headrace.metrics.crowd
        said = [crowd_text(crowd)] if crowd is not None else []
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

    # -- reading ahead ---------------------------------------------------------------------------------------------

    def on_text_area_changed(self) -> None:
        self._typed = time.monotonic()
        self._wait_for_pause()
        if self._counting is None:
            self._counting = self.set_timer(_COUNT_S, self._count)

    def _wait_for_pause(self) -> None:
        if self._pause is not None:
            self._pause.stop()
        self._pause = self.set_timer(_PAUSE_S, lambda: self._read_ahead(self.headrace.settings.chat.read_ahead))

    def _count(self) -> None:
        """While keys come: how long it is by now."""
        self._counting = None
        if self.prompt.text.strip():
            self._read_ahead(False)

    def _read_ahead(self, read: bool) -> None:
        """Nobody waits for an answer: let the engine read what it will be asked."""
        text = self.prompt.whole_text
        if self.editing is None and self.headrace.comparison is None:  # which has the engine to itself
            draft = "" if parse_command(text) else message_text(text)
            self.conversation.read_ahead(draft, count_only=not read)

    def _show_notice(self) -> None:
        notice = self.query_one("#notice", Static)
        state = self.headrace.engine.state
        down = state in ("dead", "failed")
        text = self.conversation.notice or ("the engine is not running" if down else "")
        if not text and self.conversation.shared:
            text = "this session is open in another terminal, too: what is said there and here becomes branches"
        if down:
            way_out = "F8 tries again, F5 picks a model" if state == "failed" else "F8 starts it again"
            text = f"✗ {text.rstrip('.')}. {way_out}."
        elif state == "loading" and self._fetching.active and self.conversation.messages:
            text = f"fetching {self.conversation.session.model or 'the default model'}: {self._fetching.summary()}"
        if state == "failed" and not self.conversation.messages:  # the whole of it stands above
            text = ""
        notice.display = bool(text)
        notice.set_class(down, "-error")
        width = max(2, self.query_one("#chat-column").size.width - 6)
        lines = Content(sanitise(text)).wrap(width)
        if len(lines) > _NOTICE_LINES:
            lines = [*lines[: _NOTICE_LINES - 1], lines[_NOTICE_LINES - 1].truncate(width - 1) + "…"]
        notice.update(Content("\n").join(lines))

    def _show_queue(self) -> None:
        texts = self.actions.queue.texts
        waiting = self.query_one("#queue", Static)
        waiting.display = bool(texts)
        width = max(8, self.transcript.size.width - 8)
        lines = [Content(f"⧗ {sanitise(' '.join(text.split()))}").truncate(width, ellipsis=True) for text in texts]
        if len(lines) > _QUEUE_LINES:
            lines[_QUEUE_LINES - 1 :] = [Content(f"⧗ and {len(lines) - _QUEUE_LINES + 1} more")]
        hint = Content.styled("asked when this answer has ended; /queue takes them back", "$quiet")
        waiting.update(Content("\n").join([*lines, hint]) if lines else "")

    def show_metrics(self, metrics: LiveMetrics, frozen: bool) -> None:
        """The decode panel, where it is open."""
        panel = self.query_one(DecodePanel)
        if panel.display:
            panel.show(metrics, frozen)

    # -- keys ------------------------------------------------------------------------------------------------------

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
            if prompt.put_aside():
                self.headrace.say("put aside: ↑ brings it back")
        elif time.monotonic() < self._interrupted + _TWICE_S:
            self.actions.do_quit("")
        else:
            self._interrupted = time.monotonic()
            self.headrace.say("Ctrl+C again leaves")

    def action_do(self, name: str) -> None:
        self.run_command(name, "")

    def action_panel(self) -> None:
        """The panel's next width, or why there is none."""
        if self.app.size.width < ROOM_FROM:
            self.headrace.say(f"no room for the panel in under {ROOM_FROM} columns; F2 shows all of it")
        else:
            self.query_one(DecodePanel).step()
            self.tell_status()
            self.headrace.draw_metrics(force=True)

    def action_to_transcript(self) -> None:
        self.transcript.focus()
        self.transcript.action_select(-1)

    def action_page(self, by: int) -> None:
        self.transcript.scroll_pages(by)

    def action_head(self) -> None:
        self.transcript.to_start()

    def action_redraw(self) -> None:
        """Ctrl+L: after something else wrote on the terminal."""
        self.app.refresh(repaint=True, layout=True)

    def action_tail(self) -> None:
        self.transcript.to_end()

    def on_key(self, event: events.Key) -> None:
        """A letter that is no command where the keys are is meant for the input."""
        if event.is_printable and event.character is not None and event.key not in self.active_bindings:
            event.stop()
            event.prevent_default()
            self.prompt.type(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """As is what is pasted while the keys are elsewhere."""
        if not self.prompt.has_focus:
            event.stop()
            self.prompt.paste(event.text)

    # -- messages from the widgets ---------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        invocation = parse_command(event.text) if self.editing is None else None
        try:
            if invocation is None:
                self.actions.send(event.text)
            elif invocation.command is None:
                raise UsageError(f"there is no command /{invocation.name}; F1 lists them")
            else:
                self.run_command(invocation.command.name, invocation.argument)
        except HeadraceError as error:
            self.prompt.put_back(event.typed)
            self._refuse(error)

    def run_command(self, name: str, argument: str) -> None:
        """Carry out a slash command; what it refuses is said, nothing breaks."""
        try:
            getattr(self.actions, f"do_{name}")(argument)
        except HeadraceError as error:
            self._refuse(error)

    def _refuse(self, error: HeadraceError) -> None:
        self.headrace.say(f"{error}" + (f" ({error.hint})" if error.hint else ""), problem=True)

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
            self._refuse(error)
