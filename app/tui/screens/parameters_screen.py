"""Screen of a session's parameters. An empty field takes the model's value, or the default.

A field for each of `PARAMETERS` (`app/chat/parameters.py`), which follow from the table of options; nothing is listed
here. Values are stored with the session, all or none.

Guard: tests/tui/screens/test_dialogs.py.
"""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static, TextArea

from headrace.app.answer.options import recommended_options
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parameters import PARAMETERS, Parameter, read_parameter, write_parameter
from headrace.app.engine.model_card import ModelCard
from headrace.app.tui.input.fields import Area, Field
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.errors import SessionError, UsageError


class ParametersScreen(SingleDismissal, ModalScreen[None]):
    """Ctrl+S saves, Esc discards. Typing filters the parameters; Enter then goes to the first of those shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", key_display="^S", priority=True),
        Binding("escape,f6", "dismiss", "Discard", key_display="Esc", priority=True),
    ]

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-roomy")]  # noqa: RUF012 - as textual declares it

    def __init__(self, conversation: Conversation, card: ModelCard | None, *, begin_at: str = "filter") -> None:
        """begin_at: id of the field that has the focus first."""
        super().__init__()
        self._begin_at = begin_at
        self._conversation = conversation
        recommended = card.generation_defaults if card is not None else {}
        self._recommended = recommended_options(recommended).given()
        self._refused: tuple[str, Content] | None = None  # the field, and why

    def compose(self) -> ComposeResult:
        session = self._conversation.session
        with VerticalScroll(classes="dialog -large", id="parameters") as box:
            box.can_focus = False  # the fields have the keys, and scroll into view
            box.border_title = Content("parameters of this session")
            yield Field(placeholder="type to filter", id="filter")
            yield Label("system prompt", id="system-label")
            yield Area(session.system, id="system", tab_behavior="focus")
            for parameter in PARAMETERS:
                with Horizontal(classes="parameter"):
                    yield Label(parameter.name)
                    yield Field(
                        write_parameter(parameter.name, session.sampling),
                        placeholder=self._default(parameter.name),
                        id=parameter.name,
                        compact=True,
                    )
                    yield Static(Content.styled(parameter.help, "$quiet"), classes="about")
            yield Static("", id="line")
        yield KeyBar()

    def _default(self, name: str) -> str:
        """Return the value in effect for an empty field."""
        if name in self._recommended:
            return f"model: {self._recommended[name]:g}"
        return "greedy" if name == "temperature" else "default"

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Show the field's full description at the bottom, or its error."""
        refused, reason = self._refused or (None, Content(""))
        if refused is not None and event.widget.id == refused:
            self._say(reason)
            return
        if event.widget.id == "filter":
            self._say(Content.styled("Enter goes to the first parameter shown", "$quiet"))
            return
        about = next((_about(parameter) for parameter in PARAMETERS if parameter.name == event.widget.id), "")
        self._say(Content.styled(about or "system prompt: instructions before the conversation", "$quiet"))

    def _say(self, line: Content) -> None:
        self.query_one("#line", Static).update(line)

    def on_mount(self) -> None:
        self.query_one(f"#{self._begin_at}").focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the parameters with all words of the filter in their name or help."""
        if event.input.id != "filter":
            return
        words = event.value.lower().split()

        def matches(text: str) -> bool:
            return all(word in text.lower() for word in words)

        for widget in self.query("#system-label, #system"):
            widget.display = matches("system prompt")
        for row, parameter in zip(self.query(".parameter"), PARAMETERS, strict=True):
            row.display = matches(f"{parameter.name} {parameter.help}")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self.focus_next()
        else:
            self.action_save()

    def action_save(self) -> None:
        """Save all values, or none if one is invalid."""
        self._refused = None
        values: dict[str, object] = {}
        for parameter in PARAMETERS:
            field = self.query_one(f"#{parameter.name}", Input)
            try:
                values[parameter.name] = read_parameter(parameter.name, field.value)
            except UsageError as error:
                reason = Content.styled(f"✗ {error}", "bold $text-error")
                self._refused = parameter.name, reason
                self._say(reason)
                self.query_one("#filter", Input).clear()  # it may hide the field
                field.focus()  # says so again, whenever that comes about
                return
        try:
            self._conversation.branch.set_system(self.query_one("#system", TextArea).text.strip())
            self._conversation.branch.set_sampling(values)
        except SessionError as error:
            self._say(Content.styled(f"✗ {error}", "bold $text-error"))
        else:
            self.dismiss()


def _about(parameter: Parameter) -> str:
    """Return a parameter's description and range."""
    return f"{parameter.help} ({parameter.range})"
