"""The list of options that bears page keys without room for an entry, as in a terminal of one cell."""

from typing import Any

from textual.widgets import OptionList


class PagedOptionList(OptionList):
    """Textual's list; page keys do nothing while its entries have no lines."""

    def _move_page(self, direction: Any) -> None:
        if has_line(self):
            super()._move_page(direction)


def has_line(options: OptionList) -> bool:
    """Return whether the highlighted entry has been laid out."""
    return (options.highlighted or 0) in options._index_to_line
