"""A dialog with a list, and the parts that its users share: models, sessions, branches.

A screen with a filter has a `Field` above the list. It keeps the focus, and keys that move go on to the list.
tests/tui/test_narrow.py has the heights, test_dialogs.py the keys.
"""

from collections.abc import Iterator, Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType
from textual.widget import Widget
from textual.widgets.option_list import Option

from headrace.app.tui.input.fields import Field
from headrace.app.tui.screens.dialogs import is_open
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal
from headrace.app.tui.widgets.key_bar import KeyBar

_FOOTER = 1  # line below a dialog's list that shows the keys


class ListScreen(SingleDismissal, ModalScreen[ScreenResultType]):
    """Subclasses yield their widgets in `parts`, among them one `PagedOptionList`, and fill it by `set_options`."""

    HEADING = ""

    def parts(self) -> Iterator[Widget]:
        """Yield the widgets in the dialog, from the top down."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large") as box:
            box.border_title = Content(self.HEADING)
            yield from self.parts()
        yield KeyBar()

    @property
    def options(self) -> PagedOptionList:
        return self.query_one(PagedOptionList)

    @property
    def words(self) -> str:
        """The text that is typed into the field."""
        return self.query_one(Field).value

    def set_options(self, options: Sequence[Option], nothing: str, *, marked: int | None) -> None:
        """Replace the list.

        nothing: shown in place of no options.
        marked: index of the highlighted option; None: none is.
        """
        self.options.clear_options()
        self.options.add_options(options or [Option(Content.styled(nothing, "$quiet"), disabled=True)])
        self.options.highlighted = marked if options else None
        self.call_after_refresh(self.fit)  # heights of new options are known then

    def fit(self) -> None:
        """Fit the list to its content and to the window."""
        if not is_open(self):
            return
        box = self.query_one(".dialog")
        others = [child for child in box.children if child is not self.options and child.display]
        used_lines = sum(child.outer_size.height + child.styles.margin.height for child in others) + box.gutter.height
        max_lines = self.size.height
        if not self.app.has_class("-short"):
            max_lines = self.size.height * 9 // 10
        self.options.styles.max_height = max(3, max_lines - used_lines - _FOOTER)

    def on_resize(self) -> None:
        self.call_after_refresh(self.fit)

    def on_key(self, event: events.Key) -> None:
        """Move in the list while the field has the focus."""
        moves = {
            "up": self.options.action_cursor_up,
            "down": self.options.action_cursor_down,
            "pageup": self.options.action_page_up,
            "pagedown": self.options.action_page_down,
        }
        if event.key in moves and not self.options.has_focus:
            event.stop()
            event.prevent_default()
            moves[event.key]()  # type: ignore[no-untyped-call]
