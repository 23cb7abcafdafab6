"""The command palette that bears impatient keys: pages without laid-out entries, and Enter more than once."""

from textual.command import CommandList, CommandPalette

from headrace.app.tui.single_dismissal import SingleDismissal
from headrace.app.tui.textual_overrides.option_list import has_line


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
