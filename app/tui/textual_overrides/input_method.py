"""The terminal's own cursor, where input methods of Chinese, Japanese and Korean show their text.

Textual sets `App.cursor_position` when a field's caret moves. A layout moves fields as well: after it the cursor would
stay in the old place until the next key. So it is computed from the focused field each time it is written.

Guard: tests/tui/textual_overrides/test_input_method.py.
"""

from textual.app import App
from textual.geometry import Offset
from textual.widgets import Input, TextArea


class InputMethodCursor:
    """Mixin of an `App`."""

    _set_position = Offset(0, 0)

    @property
    def cursor_position(self) -> Offset:
        """The place of the focused field's caret; where there is none, the last that was set."""
        assert isinstance(self, App)
        field = self.focused if self.is_running and self.screen_stack else None
        if not isinstance(field, Input | TextArea) or not field.is_attached:
            return self._set_position
        offset = field.cursor_screen_offset
        # One column further at the end of an `Input` is the room for the caret, not its place.
        return offset - (1, 0) if isinstance(field, Input) and field.cursor_at_end else offset

    @cursor_position.setter
    def cursor_position(self, offset: Offset) -> None:
        self._set_position = offset
