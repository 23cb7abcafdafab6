"""The screen of /compare: two answers with different setups, generated one after the other.

Below 100 columns the panes stand one above the other. In a low window only one of them shows its text; F3 shows the
other.

`ChatActions` opens it over a `Comparison` (`app/chat/comparison.py`), which has the answers and their engines. It has a
prompt of its own, whose unsent text goes back to the chat. tests/tui/screens/test_compare_screen.py guards this.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Static

from headrace.app.answer.phrases import sampling_in_effect
from headrace.app.chat.commands import message_text, parse_command
from headrace.app.chat.message_queue import MessageQueue
from headrace.app.chat.parallel_answers import ParallelAnswer
from headrace.app.sessions.records import Draft, joined
from headrace.app.tui.decode.machine import contention_text
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.message_actions import copy_selection
from headrace.app.tui.screens.notices import Notice, QueuedMessages
from headrace.app.tui.screens.parallel_screen import AnswerPane, ParallelScreen
from headrace.app.tui.transcript.transcript import SCROLL_KEYS
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.errors import HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.chat.comparison import Comparison
    from headrace.app.chat.parallel_answers import ParallelEvent

SIDE_BY_SIDE = 100  # columns from which the panes stand next to each other
_BOTH_LINES = 36  # lines from which both show their text, one above the other


class FileMenu(CompletionMenu):
    """A completion menu without slash commands."""

    def offer(self, before_cursor: str) -> None:
        if before_cursor.startswith("/") and " " not in before_cursor:
            before_cursor = ""
        super().offer(before_cursor)


class CompareScreen(ParallelScreen):
    """Esc stops the answer, then asks which one to continue with."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *SCROLL_KEYS,
        # Esc has two actions: `check_action` enables one of them at a time.
        Binding("escape", "stop", "Stop this answer", key_display="Esc"),
        Binding("escape", "leave", "Take one", key_display="Esc"),
        Binding("ctrl+b", "again", "Both again"),
        Binding("f1", "app.show_keys", "Help", key_display="F1"),
        Binding("f3", "turn_over", "Other side", key_display="F3"),
        Binding("ctrl+t", "think", "Thinking", show=False),
    ]

    def __init__(self, state: ChatState, comparison: "Comparison") -> None:
        panes = [AnswerPane(side, comparison.first, state.metrics, _title) for side in comparison.answers]
        super().__init__(state, comparison, panes)
        self.comparison = comparison
        self._queue = MessageQueue()
        self._shows_one = False  # there is room for one pane's text only
        self._front = self.panes[0]  # that pane
        self._is_front_chosen = False  # by the user; else it is the pane that answers
        self._chat_unsent = state.unsent  # returns the text of the chat's prompt, which this screen covers

    def compose(self) -> ComposeResult:
        yield Static(id="parallel-head", markup=False)
        with Container(id="compare-panes"):
            yield from self.panes
        yield Notice(id="notice", markup=False)
        yield QueuedMessages(id="queue", markup=False)
        menu = FileMenu(id="menu")
        yield menu
        yield Prompt(menu, id="prompt")
        yield KeyBar()

    def on_mount(self) -> None:
        # Textual calls the `on_mount` of the base class, too.
        questions = [message.content for message in self.state.conversation.messages if message.role == "user"]
        self.prompt.remember(questions)
        self.prompt.focus()
        self.prompt.placeholder = "a question: A answers, then B"
        self.state.unsent = self._unsent  # `ChatActions` sets the chat's again when this screen is left

    @cached_property
    def prompt(self) -> Prompt:
        # Cached: its text is stored when a pause of typing ends, which may be while the widgets are taken away.
        return self.query_one(Prompt)

    @property
    def keys_state(self) -> object:
        return self.comparison.running

    # -- drawing ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> str:
        parts = ["▚ compare", "one after the other, for undisturbed speed"]
        if self.comparison.has_two_engines:
            parts.append("both models are in memory")
        elif self.comparison.takes_turns:
            parts.append("loaded one at a time")
        return " · ".join(parts)

    def handle_events(self, events: "Sequence[ParallelEvent]") -> None:
        super().handle_events(events)
        for pane in self.panes:
            if any(side is pane.side for side, _ in events):
                self._bring_forward(pane)

    def sync_panes(self) -> None:
        self._send_next()  # first: it may begin the answers that are drawn below
        a, b = self.panes
        a.sync(b)
        b.sync(a)
        for pane in self.panes:
            if pane.side is self.comparison.running:
                self._bring_forward(pane)
        for pane in self.panes:
            is_shown = not self._shows_one or pane is self._front
            if pane.transcript.display != is_shown:
                pane.transcript.display = is_shown
                pane.set_class(not is_shown, "-folded")
        title = "the same question to both"
        contention = self.state.metrics.contention
        if contention:
            title += f" · {contention_text(contention)}"
        self.prompt.show_title(title)

    def _bring_forward(self, pane: AnswerPane) -> None:
        """Have this pane show its text where only one can, unless the user has chosen one."""
        if not self._is_front_chosen:
            self._front = pane

    def _send_next(self) -> None:
        """Ask the next queued question once both answers are complete; put the queue into the prompt if they aren't."""
        queue = self._queue
        comparison = self.comparison
        if queue.texts and comparison.running is None:
            answers = [side.answer for side in comparison.answers]
            if not queue.send_after(answers, comparison.ask, comparison):
                self._return_queue()
        self.query_one(QueuedMessages).show(queue.texts)

    def _return_queue(self) -> None:
        """Put queued questions back into the prompt, before its text."""
        self.prompt.put_before(self._queue.take_back())

    def on_resize(self, event: events.Resize) -> None:
        """Arrange the panes: next to each other, above each other, or one at a time."""
        side_by_side = event.size.width >= SIDE_BY_SIDE
        self.set_class(not side_by_side, "-above")
        self._shows_one = not side_by_side and event.size.height < _BOTH_LINES
        self.call_after_refresh(self.sync)
        self.refresh_bindings()

    # -- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "stop":
            return self.comparison.running is not None
        if action in ("leave", "again"):
            return self.comparison.running is None
        if action == "turn_over":
            return self._shows_one
        return True

    def action_stop(self) -> None:
        """Stop the answer; the other one is next."""
        self.comparison.stop()

    def action_again(self) -> None:
        if self.state.attempt(self.comparison.again):
            self._to_end()

    def action_turn_over(self) -> None:
        """Show the other pane's text."""
        a, b = self.panes
        self._front = b if self._front is a else a
        self._is_front_chosen = True
        self.sync()

    def action_do(self, name: str) -> None:  # noqa: ARG002
        """Refuse a key of the prompt that is the chat's."""
        self.state.notify("that belongs to the chat: Esc takes an answer there")

    def action_leave(self) -> None:
        """Ask with which answer the conversation continues."""
        a, b = self.comparison.answers
        if not a.messages and not b.messages:
            self.leave(None)
            return
        answers = [(side.name, side.name.lower(), f"with {side.name}: {_setup_text(side)}") for side in (a, b)]
        answers.append(("back", "n", "as before; both answers stay as branches"))
        text = "The conversation continues with this answer, its model and its settings. The other is a branch: /branch"
        self.app.push_screen(Choose("continue with which?", text, answers), self._leave_with)

    def _leave_with(self, choice: str | None) -> None:
        if choice is None:  # Esc: the comparison goes on
            return
        for side in self.comparison.answers:
            if side.name == choice:
                self.leave(side)
                return
        self.leave(None)

    @property
    def typed(self) -> Draft:
        """The unsent text here: queued questions, then the prompt."""
        return joined([*map(Draft, self._queue.texts), self.prompt.draft])

    def _unsent(self) -> Draft:
        """Return the unsent text here, after that of the chat."""
        if self._chat_unsent is None:
            return self.typed
        return joined([self._chat_unsent(), self.typed])

    # -- messages from the widgets ---------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        invocation = parse_command(event.text)
        try:
            if invocation is not None and invocation.name == "queue" and self._queue.texts:
                self._return_queue()
            elif invocation is not None:
                raise UsageError("commands belong to the chat: Esc takes an answer there")
            elif self.comparison.running is not None:
                self._queue.add(message_text(event.text))
            else:
                self.comparison.ask(message_text(event.text))
        except HeadraceError as error:
            if invocation is None:  # a refused question returns to the prompt, a command does not
                self.prompt.restore(event.typed)
            self.state.show_error(error)
        else:
            self._to_end()

    def on_prompt_interrupted(self) -> None:
        """Handle Ctrl+C: copy a selection, else stop the answer, else clear the prompt."""
        if copy_selection(self, self.state):
            return
        if self.comparison.running is not None:
            self.comparison.stop()
        elif self.prompt.text:
            self.prompt.keep_draft()
        else:
            self.state.notify("Esc leaves the comparison, Ctrl+Q quits")

    async def on_prompt_end_of_input(self) -> None:
        await self.app.action_quit()

    def on_paste(self, event: events.Paste) -> None:
        if not self.prompt.has_focus:
            event.stop()
            self.prompt.paste(event.text)

    def _to_end(self) -> None:
        """Show the ends of both texts, and the pane that answers in front."""
        self._is_front_chosen = False
        self.sync()
        for pane in self.panes:
            pane.transcript.to_end()


def _setup_text(side: ParallelAnswer) -> str:
    """Return the model, its settings and its system prompt."""
    name = side.setup.model_name
    if side.card is not None:
        name = side.card.name
    parts = [name, sampling_in_effect(side.effective)]
    if side.setup.system:
        parts.append(f"system: {' '.join(side.setup.system.split())}")
    return " · ".join(parts)


def _title(side: ParallelAnswer) -> str:
    return f"{side.name} · {_setup_text(side)}"
