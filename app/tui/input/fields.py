"""Text fields whose keys take effect in the order they were typed, however fast they come.

Textual hands a key to the widget with the focus first and runs the bindings only after the key has come back to the
app; by then letters typed after it may already be in the text ("abc", Backspace, "d" becomes "abc"). These fields
run the bindings themselves, when it is the key's turn.

Textual draws a field's text as it is, escape sequences included; what stands in these is safe for the terminal, also
where an answer is edited or something was pasted. What is seen is what is sent.
"""

import re
from typing import Any

from textual import events
from textual.widget import Widget
from textual.widgets import Input, TextArea
from textual.widgets.text_area import Edit, EditResult

from headrace.app.output.sanitise import sanitise

_JOINER = re.compile("[\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef]")


class Field(Input):
    """One line."""

    def validate_value(self, value: str) -> str:
        return sanitise(value)

    async def on_key(self, event: events.Key) -> None:
        if character := joiner(event):
            start, end = sorted(self.selection)
            if takes(self.value[:start], character):
                self.replace(character, start, end)
        else:
            await _run_binding(self, event)


class Area(TextArea):
    """Several lines."""

    def __init__(self, text: str = "", **options: Any) -> None:
        super().__init__(sanitise(text), **options)

    def load_text(self, text: str) -> None:
        super().load_text(sanitise(text))

    def edit(self, edit: Edit) -> EditResult:
        edit.text = sanitise(edit.text)
        return super().edit(edit)

    async def on_key(self, event: events.Key) -> None:
        await _run_binding(self, event)


def joiner(event: events.Key) -> str | None:
    """The joiner or variation selector that was typed, which textual takes for a key and not for text."""
    return event.character if event.character is not None and _JOINER.fullmatch(event.character) else None


def takes(text: str, character: str) -> bool:
    """Whether it belongs after this text: it is part of the character before it, alone it is nothing."""
    return sanitise(text + character) == text + character


async def _run_binding(field: Widget, event: events.Key) -> None:
    """Do what the key is bound to, if it is; Textual's own handler then sees only keys that are not."""
    if event.is_printable:
        return
    bound = field.screen.active_bindings.get(event.key)
    if bound is not None and bound.enabled and await field.app.run_action(bound.binding.action, bound.node):
        event.stop()
        event.prevent_default()
