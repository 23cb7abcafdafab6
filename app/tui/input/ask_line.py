"""One line of the chat's prompt on another screen, so that a question can be asked while its steps are watched.

The line and the prompt have the same text, and nothing typed here is lost: each change is put into the prompt. A text
that a line cannot show stays in the prompt, and the line is disabled. `HeadraceApp.action_decode_view` makes it for F2.

Guards: tests/tui/screens/test_decode_screen.py and tests/tui/test_safety.py.
"""

from collections.abc import Callable

from textual import events
from textual.widgets import Input

from headrace.app.tui.input.fields import Field
from headrace.app.tui.input.prompt import Prompt

_ELSEWHERE = "F2 goes back to the text in the chat's input"


class AskLine(Field):
    """Disabled while the prompt has what a line cannot show: several lines, pastes, an edit."""

    def __init__(self, prompt: Prompt, send: Callable[[str], bool], *, usable: bool) -> None:
        """Begin with the prompt's text.

        prompt: of the chat's screen.
        send: returns False for a refused message, which stays.
        usable: there is a conversation to ask in.
        """
        text = ""
        hint = _ELSEWHERE
        is_plain = usable and "\n" not in prompt.text and not prompt.draft.pastes
        if is_plain:
            text = prompt.text
            hint = "ask here, and watch"
        super().__init__(text, placeholder=hint, id="ask", disabled=not is_plain)
        self.cursor_blink = False
        self._prompt = prompt
        self._send = send

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Leave digits to the screen while the line is empty: there they show and hide sections."""
        is_digit = character is not None and character in "0123456789"
        return super().check_consume_key(key, character) and (bool(self.value) or not is_digit)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        # A line that `on_paste` has emptied and disabled must not empty the prompt, which has the text.
        if not self.disabled and event.value != self._prompt.text:
            self._prompt.put(event.value)

    async def on_paste(self, event: events.Paste) -> None:
        """Leave several lines to the prompt: a line would keep the first one only."""
        if "\n" in event.text.strip():
            event.prevent_default()
            event.stop()
            self.disabled = True
            self.value = ""
            self.placeholder = _ELSEWHERE
            self._prompt.paste(event.text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value
        if text.strip() and self._send(text):
            self._prompt.remember([text])
            self.clear()  # and so the prompt, see `on_input_changed`
