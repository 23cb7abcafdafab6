"""Lists of options that bear impatient keys: page keys before entries have lines, and Enter more than once.

Entries have no lines before the first layout, and in a terminal of one cell. Textual looks them up all the same.

Methods with a leading underscore are textual's own, overridden here. pyproject.toml pins the version they were read in
(see this package), and tests/tui/test_overrides.py fails for another one. Then compare `OptionList._move_page`,
`CommandPalette._action_command_list` and `_select_or_command` with its sources.

Guards: `test_page_keys_do_nothing_in_a_list_without_room` (tests/tui/test_chat.py), tests/tui/screens/test_dialogs.py.
"""

from typing import Any

from textual.command import CommandList, CommandPalette
from textual.widgets import OptionList

from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal


class PagedOptionList(OptionList):
    """Textual's list; page keys do nothing while its entries have no lines."""

    def _move_page(self, direction: Any) -> None:
        if has_line(self):
            super()._move_page(direction)


def has_line(options: OptionList) -> bool:
    """Return whether the highlighted entry has been laid out; the first one if none is, as `_move_page` does."""
    return (options.highlighted or 0) in options._index_to_line


class Palette(SingleDismissal, CommandPalette):
    """Textual's palette; keys count only while it is the current screen."""

    def _action_command_list(self, action: str) -> None:
        # OptionList's pages read the line of an entry, which exists after the next layout only.
        if action.startswith("page") and not has_line(self.query_one(CommandList)):
            return
        super()._action_command_list(action)

    def _select_or_command(self, event: object = None) -> None:
        if self.app.screen is self:
            super()._select_or_command(event)  # type: ignore[arg-type]
