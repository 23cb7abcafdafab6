"""Two answers side by side, each with its figures. Esc stops, or leaves with one of them.

Below 110 columns one pane stands above the other; where that leaves too few lines, only the pane that answers shows
what it says, and F3 shows the other one instead.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.widgets import Static

from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.decode.machine import contention_text
from headrace.app.tui.input.commands import message_text, parse_command
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.compare_pane import ComparePane
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.notices import Notice
from headrace.app.tui.screens.scrolling import ScrollingScreen
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.errors import HeadraceError, UsageError

if TYPE_CHECKING:
    from headrace.app.chat.comparison import Comparison
    from headrace.app.chat.parallel_answers import AnswerEvent

SIDE_BY_SIDE = 110  # columns from which the panes stand next to each other
_BOTH = 36  # lines from which both show what they say, one above the other
_HONEST = "one after the other: two at once would slow each other"


class FileMenu(CompletionMenu):
    """Paths only: the chat's commands are the chat's."""

    def offer(self, before_cursor: str) -> None:
        super().offer("" if before_cursor.startswith("/") and " " not in before_cursor else before_cursor)


class CompareScreen(ScrollingScreen):
    """A comparison; the app polls it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop this answer", key_display="Esc"),
        Binding("escape", "leave", "Take one", key_display="Esc"),
        Binding("ctrl+r", "again", "Both again"),
        Binding("f1", "app.show_keys", "Help", key_display="F1"),
        Binding("f3", "turn_over", "Other side", key_display="F3"),
        Binding("ctrl+t", "think", "Thinking", show=False),
    ]

    def __init__(self, headrace: ChatApp, comparison: "Comparison") -> None:
        super().__init__()
        self.headrace, self.comparison = headrace, comparison
        first = comparison.first
        self.panes = [
            ComparePane(side, first, headrace.metrics, f"side-{side.name.lower()}") for side in comparison.answers
        ]
        self._one = False  # only one pane has room for what it says,
        self._in_front = self.panes[0]  # this one,
        self._chosen = False  # as the user wants it; else the one that answers
        self._busy: object = None
        self._titled = ""  # the input's frame
        self._told = "", 0  # what the notice says, cut for which width

    def compose(self) -> ComposeResult:
        yield Static(id="compare-head", markup=False)
        with Container(id="compare-panes"):
            yield from self.panes
        yield Notice(id="notice", markup=False)
        menu = FileMenu(id="menu")
        yield menu
        yield Prompt(menu, id="prompt")
        yield KeyBar()

    def on_mount(self) -> None:
        asked = (message.content for message in self.headrace.conversation.messages if message.role == "user")
        self.prompt.remember(list(asked))
        self.prompt.focus()
        self.prompt.placeholder = "a question: A answers, then B"
        for pane in self.panes:
            pane.transcript.show_thinking = self.headrace.settings.chat.show_thinking
        self.call_after_refresh(self.sync)

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def hear(self, heard: "Sequence[AnswerEvent]") -> None:
        """Take in what the engines said; draws nothing."""
        for side, event in heard:
            for pane in self.panes:
                if pane.side is side:
                    pane.hear(event)
                    self._in_front = self._in_front if self._chosen else pane

    def extend_last_line(self) -> bool:
        """Show what was added to the answer, where only its last line is another one."""
        late = [pane for pane in self.panes if not pane.extend_last_line()]
        return not late

    def sync(self) -> None:
        """Draw what changed."""
        if not self.is_mounted or not self.query(Notice):
            return
        a, b = self.panes
        a.sync(b)
        b.sync(a)
        running = self.comparison.running
        if running is not self._busy:
            self._busy = running
            self.refresh_bindings()
        self._show_in_front()
        self._show_words()

    def _show_words(self) -> None:
        head = self.query_one("#compare-head", Static)
        comparison = self.comparison
        memory = "each is loaded for its turn" if comparison.takes_turns else ""
        if comparison.beside:
            memory = "both models are in memory"
        said = " · ".join(part for part in ("▚ compare", _HONEST, memory) if part)
        width = max(4, self.size.width - 2)
        line = Content.assemble((said[:9], "bold $text-primary"), (said[9:], "$quiet")).truncate(width, ellipsis=True)
        if str(head.render()) != line.plain:
            head.update(line)
        contention = self.headrace.metrics.contention
        title = " · ".join(
            filter(None, ["the same question to both", contention_text(contention) if contention else ""])
        )
        if title != self._titled:
            self._titled = title
            self.prompt.border_title = Content(title)
        text = " · ".join(filter(None, [comparison.notice, *self._refusals()]))
        if (text, width) != self._told:
            self._told = text, width
            self.query_one(Notice).tell(text)

    def _refusals(self) -> list[str]:
        """Why a side has no answer, in full: its own line may be too short for it."""
        return [f"{pane.side.name}: {pane.side.notice}" for pane in self.panes if pane.side.notice is not None]

    def _show_in_front(self) -> None:
        for pane in self.panes:
            if pane.side is self.comparison.running and not self._chosen:
                self._in_front = pane
        for pane in self.panes:
            shown = not self._one or pane is self._in_front
            if pane.transcript.display != shown:
                pane.transcript.display = shown
                pane.set_class(not shown, "-folded")

    def on_resize(self, event: events.Resize) -> None:
        """Beside each other, above each other, or one at a time."""
        beside = event.size.width >= SIDE_BY_SIDE
        self.set_class(not beside, "-above")
        self._one = not beside and event.size.height < _BOTH
        self.call_after_refresh(self.sync)
        self.refresh_bindings()

    # -- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "stop":
            return self.comparison.running is not None
        if action in ("leave", "again"):
            return self.comparison.running is None
        return action != "turn_over" or self._one

    def action_stop(self) -> None:
        """Stop the answer; the other side has its turn then."""
        self.comparison.stop()

    def action_again(self) -> None:
        try:
            self.comparison.again()
        except HeadraceError as error:
            self.headrace.refuse(error)
        else:
            self._to_end()

    def action_turn_over(self) -> None:
        """Show what the other side says."""
        self._chosen, self._in_front = True, self.panes[self._in_front is self.panes[0]]
        self.sync()

    def action_think(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = not pane.transcript.show_thinking

    @property
    def scrolled(self) -> Sequence[Transcript]:
        return [pane.transcript for pane in self.panes]

    def action_do(self, name: str) -> None:  # noqa: ARG002
        """A key of the chat's input."""
        self.headrace.say("that belongs to the chat: Esc takes an answer there")

    def action_leave(self) -> None:
        """Ask which answer the conversation goes on with."""
        a, b = self.comparison.answers
        if not a.messages and not b.messages:
            self._taken("back")
            return
        answers = [
            (side.name, side.name.lower(), f"with {side.name}: {self._words_of(pane)}")
            for side, pane in ((a, self.panes[0]), (b, self.panes[1]))
        ]
        answers.append(("back", "n", "as it was before; both answers stay as branches"))
        text = (
            "The conversation goes on with this answer, its model and its settings. The other stays beside it: /branch"
        )
        self.app.push_screen(Choose("go on with which?", text, answers), self._taken)

    def _words_of(self, pane: ComparePane) -> str:
        return str(pane.border_title or "").partition(" · ")[2]

    def _taken(self, choice: str | None) -> None:
        if choice is None:
            return
        side = next((side for side in self.comparison.answers if side.name == choice), None)
        try:
            self.headrace.end_comparison(side)
        except HeadraceError as error:
            self.headrace.refuse(error)

    # -- messages from the widgets ---------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        try:
            if parse_command(event.text) is not None:
                raise UsageError("commands belong to the chat: Esc takes an answer there")
            self.comparison.ask(message_text(event.text))
        except HeadraceError as error:
            self.prompt.restore(event.typed)
            self.headrace.refuse(error)
        else:
            self._to_end()

    def on_prompt_interrupted(self) -> None:
        """Ctrl+C: copy a selection, else stop the answer, else put the draft aside."""
        selected = self.get_selected_text()
        if selected:
            self.headrace.copy(selected, "the selection")
            self.clear_selection()
        elif self.comparison.running is not None:
            self.comparison.stop()
        elif self.prompt.text:
            self.prompt.keep_draft()
        else:
            self.headrace.say("Esc leaves the comparison, Ctrl+Q the program")

    async def on_prompt_end_of_input(self) -> None:
        await self.app.action_quit()

    def on_paste(self, event: events.Paste) -> None:
        if not self.prompt.has_focus:
            event.stop()
            self.prompt.paste(event.text)

    def _to_end(self) -> None:
        self._chosen = False
        self.sync()
        for pane in self.panes:
            pane.transcript.to_end()
