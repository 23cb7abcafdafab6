"""Screens that close once, however fast keys come.

The first base of every screen here that is dismissed. tests/tui/screens/test_dialogs.py has keys that come too fast.
"""

from typing import TYPE_CHECKING, Any

from textual.await_complete import AwaitComplete

if TYPE_CHECKING:
    from textual.screen import Screen

    _Base = Screen[Any]
else:
    # Not a Screen at run time: textual takes style sheets and bindings from the first base that is one.
    _Base = object


class SingleDismissal(_Base):
    """A mixin for screens that can be dismissed only while they are the current one.

    Textual's `dismiss` closes the current screen, which is another one after the first of two quick keys. See
    docs/workarounds.md.
    """

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """See `Screen`. Without effect if another screen is the current one."""
        if not self.is_mounted or self.app.screen is not self:
            return AwaitComplete()
        return super().dismiss(result)
