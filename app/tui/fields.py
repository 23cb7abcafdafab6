"""Text fields whose keys take effect in the order they were typed, however fast they come.

Textual hands a key to the widget with the focus first and runs the bindings only after the key has come back to the
app; by then letters typed after it may already be in the text ("abc", Backspace, "d" becomes "abc"). These fields
run the bindings themselves, when it is the key's turn.
"""

from textual import events
from textual.widget import Widget
from textual.widgets import Input, TextArea


class Field(Input):
    """One line."""

    async def _on_key(self, event: events.Key) -> None:
        await _run_binding(self, event)


class Area(TextArea):
    """Several lines."""

    async def _on_key(self, event: events.Key) -> None:
        await _run_binding(self, event)


async def _run_binding(field: Widget, event: events.Key) -> None:
    """Do what the key is bound to, if it is; Textual's own handler then sees only keys that are not."""
    if event.is_printable:
        return
    bound = field.screen.active_bindings.get(event.key)
    if bound is not None and bound.enabled and await field.app.run_action(bound.binding.action, bound.node):
        event.stop()
        event.prevent_default()
