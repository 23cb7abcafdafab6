"""Text fields that handle keys in the order they were typed and show no control characters.

Textual hands a key to the focused widget first and runs bindings after the key came back to the app. Letters typed
after it may be in the text by then ("abc", Backspace, "d" becomes "abc"). These fields run the bindings themselves.

Textual draws a field's text unchanged, escape sequences included. The text of these fields is sanitised.

Use these in place of `Input` and `TextArea` everywhere; tests/tui/test_typing.py types as fast as a machine.
"""

import re
from typing import Any

from textual import events
from textual.widget import Widget
from textual.widgets import Input, TextArea
from textual.widgets.text_area import Edit, EditResult

from headrace.app.output.sanitise import sanitise

_JOINER = re.compile("[\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # such as the selector of an emoji's form


class Field(Input):
    """A field of one line."""

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
    """A field of several lines."""

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
    """Return a typed joiner or variation selector, which textual treats as a key without text."""
    return event.character if event.character is not None and _JOINER.fullmatch(event.character) else None


def takes(text: str, character: str) -> bool:
    """Return True if the character belongs after this text, as part of its last character."""
    return sanitise(text + character) == text + character


async def _run_binding(field: Widget, event: events.Key) -> None:
    """Run the key's binding, if any; textual's own handler then sees only unbound keys."""
    if event.is_printable:
        return
    bound = field.screen.active_bindings.get(event.key)
    if bound is not None and bound.enabled and await field.app.run_action(bound.binding.action, bound.node):
        event.stop()
        event.prevent_default()
