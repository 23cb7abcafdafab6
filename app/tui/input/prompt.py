"""The prompt: several lines, a history, completion. Enter sends.

A long paste is shown as a placeholder, which is edited and deleted as one character would be.

Ctrl+J, and Shift+Enter where the terminal reports it, insert a line break; so does Enter after a backslash and within
triple quotes. Up on the first line and Down on the last step through the history. Each key is handled before the next
one: Enter sends the text of its own moment.

The chat's screen and the comparison's have one each, and take its messages (`Sent`, `Interrupted`, ...). Two texts are
told apart: `text` as it stands there, with placeholders, and `whole_text` with the pastes in full.

Guards: tests/tui/test_typing.py for the order of keys, test_drafts.py and test_too_long.py there for pastes.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message as Event
from textual.strip import Strip
from textual.widgets.text_area import Edit, EditResult, Location

from headrace.app.chat.continued_lines import begins_line, unquoted_lines, with_new_line
from headrace.app.engine.events import PromptCounted
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Draft
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.fields import Area, joiner, takes
from headrace.runtime.metrics.units import counted

_BIG_PASTE = 2000  # characters from which a paste is folded into one line
_PLACEHOLDER = "message, or / for commands"
_FOLDED = "[pasted text {number}: {lines}, {characters:,} characters]"
_LABEL = re.compile(r"\[pasted text \d+: [^\]]*\]")  # what _FOLDED makes: [pasted text 1: 80 lines, 2,900 characters]


class Prompt(Area):
    """The input of the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", priority=False),
        Binding("ctrl+j,shift+enter,alt+enter", "newline", "New line", key_display="^J"),
        Binding("tab,shift+tab", "stay", show=False),  # textual would give the keys to another widget
        Binding("ctrl+d", "end_of_input", "Quit", show=False),
        # A text area would select with these.
        Binding("f6", "screen.do('set')", "Settings", show=False),
        Binding("f7", "app.freeze", "Freeze", show=False),
        Binding("ctrl+underscore", "undo", "Undo", show=False),  # as in a shell: Ctrl+Z suspends
    ]

    @dataclass
    class Sent(Event):
        """Enter was pressed; the prompt is empty again.

        text: whole, with pastes.
        typed: as it stood there, for `restore`.
        """

        text: str
        typed: str

    class SentEmpty(Event):
        """Enter was pressed on an empty line."""

    class EndOfInput(Event):
        """Ctrl+D on an empty line."""

    class Interrupted(Event):
        """Ctrl+C with nothing selected."""

    def __init__(self, menu: CompletionMenu, id: str | None = None) -> None:
        super().__init__(id=id, tab_behavior="focus", highlight_cursor_line=False, placeholder=_PLACEHOLDER)
        self.cursor_blink = False  # a blinking cursor redraws the input twice a second, for ever
        self._menu = menu
        self._title = ""
        self._history: list[str] = []  # oldest first
        self._entry: int | None = None  # index in the history of the shown text; None: the draft
        self._draft = ""  # the text that was typed before the history was walked through
        # Text of each placeholder. Never emptied: the history, undo and `restore` bring placeholders back. A new one's
        # number counts them all.
        self._pastes: dict[str, str] = {}

    def render_line(self, y: int) -> Strip:
        """Draw nothing without a column for text: textual cannot wrap the placeholder (docs/workarounds.md)."""
        if self.content_size.width == 0:
            return Strip.blank(0)
        return super().render_line(y)

    # -- sending ---------------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Draft:
        """The unsent text, with the pastes that have a placeholder in it."""
        text = self.text
        return Draft(text, {label: pasted for label, pasted in self._pastes.items() if label in text})

    @property
    def whole_text(self) -> str:
        """The text with pastes in full."""
        return self.draft.whole

    def action_send(self) -> None:
        text = unquoted_lines(self.whole_text)
        typed = self.text
        if begins_line(typed):
            self.put(with_new_line(typed))
            return
        if not text.strip():
            self.post_message(self.SentEmpty())
            return
        self.keep_draft()
        self.post_message(self.Sent(text, typed))

    def keep_draft(self) -> bool:
        """Empty the prompt and put its text into the history; return False if it was blank."""
        typed = self.text
        if typed.strip() and self._history[-1:] != [typed]:
            self._history.append(typed)
        self._entry = None
        self._draft = ""
        self.put("")
        return bool(typed.strip())

    def restore(self, typed: str) -> None:
        """Put a refused message back, before the text typed since."""
        self.put(typed + self.text)

    def put(self, text: str) -> None:
        """Replace the text, the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
        self.focus()

    def put_draft(self, draft: Draft) -> None:
        """Replace the text by a kept one; its pastes get placeholders of this prompt."""
        labels = {label: self._placeholder(pasted) for label, pasted in draft.pastes.items()}
        self.put(Draft(draft.text, labels).whole)

    def put_edited(self, whole: str) -> None:
        """Replace the text by one with pastes in full; unchanged pastes get their placeholders back."""
        pasted = {pasted: label for label, pasted in self._pastes.items()}
        self.put(Draft(whole, pasted).whole)

    def put_before(self, text: str) -> None:
        """Put text before the prompt's own, with a blank line between them."""
        self.put_edited("\n\n".join(filter(None, [text, self.whole_text])))

    def remember(self, texts: list[str]) -> None:
        """Append texts, oldest first, to the history."""
        newest_first = dict.fromkeys(reversed([*self._history, *texts]))
        self._history = list(newest_first)[::-1]
        self._entry = None

    @property
    def recent_texts(self) -> list[str]:
        """The entries of the history, newest first, each once."""
        return list(dict.fromkeys(reversed(self._history)))

    def recall(self, entry: str) -> None:
        """Show a history entry; the text before it comes back after the newest one."""
        newest = max(index for index, other in enumerate(self._history) if other == entry)
        self._show_entry(newest)
        self.focus()

    def action_newline(self) -> None:
        self.type("\n")

    def action_stay(self) -> None:
        """Do nothing: Tab completes while the menu is open."""

    def type(self, text: str) -> None:
        """Insert text in place of the selection and focus the prompt."""
        self.replace(text, *self.selection, maintain_selection_offset=False)
        self.focus()

    def action_copy(self) -> None:
        """Copy a selection; without one, leave Ctrl+C to the screen."""
        if self.selected_text:
            super().action_copy()
        else:
            self.post_message(self.Interrupted())

    def action_end_of_input(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.EndOfInput())

    def show_title(self, title: str) -> None:
        """Show a text above the prompt; textual would draw the same one again."""
        if title != self._title:
            self._title = title
            self.border_title = Content(title)

    def show_size(self, draft: PromptCounted | None) -> None:
        """Show the counted tokens of the text and the room for them, below the text."""
        size = ""
        if draft is not None and draft.message and self.text.strip():  # 0: the count of an earlier text
            size = f"{draft.message:,} of {draft.room:,} tokens"
            if draft.tokens > draft.longest:
                size = f"▲ {size}: too long"
                if not draft.room:
                    size = "▲ the context is full: Enter asks which turns to leave out"
        if str(self.border_subtitle or "") != size:
            self.border_subtitle = Content(size)

    # -- keys that mean different things ---------------------------------------------------------------------------

    async def on_key(self, event: events.Key) -> None:
        self._offer()  # the message that the text changed comes behind keys that wait; the menu has to be of this text
        menu_keys = ["up", "down", "escape", "tab"]
        if self._menu.takes_enter:
            menu_keys.append("enter")
        if self._menu.is_open and event.key in menu_keys:
            event.stop()
            event.prevent_default()
            self._to_menu(event.key)
        elif character := joiner(event):
            event.stop()
            event.prevent_default()
            self._join(character)

    def _join(self, character: str) -> None:
        """Insert a joiner after the text it belongs to, if there is any."""
        (row, column), end = sorted(self.selection)
        before = self.document.get_line(row)[:column]
        if takes(before, character):
            self.replace(before + character, (row, 0), end, maintain_selection_offset=False)

    def _to_menu(self, key: str) -> None:
        """Pass a key on to the menu; a taken entry replaces the text that it completes."""
        if key == "up":
            self._menu.move(-1)
        elif key == "down":
            self._menu.move(1)
        elif key == "escape":
            self._menu.close()
        elif (choice := self._menu.accept()) is not None:
            row, column = self.cursor_location
            start = (row, max(0, column - choice.replace))
            self.replace(choice.insert, start, (row, column), maintain_selection_offset=False)
            if choice.run and key == "enter":
                self.action_send()

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self.cursor_at_first_line and self._walk(-1):
            return
        super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self.cursor_at_last_line and self._walk(1):
            return
        super().action_cursor_down(select)

    def _walk(self, by: int) -> bool:
        """Show the history entry before or after; return False at its end."""
        index = len(self._history) if self._entry is None else self._entry
        index += by
        if not 0 <= index <= len(self._history):
            return False
        self._show_entry(index)
        return True

    def _show_entry(self, index: int) -> None:
        """Show the history entry of this index; after the last one, the draft."""
        if self._entry is None:
            self._draft = self.text
        if index == len(self._history):
            self._entry = None
            self.load_text(self._draft)
        else:
            self._entry = index
            self.load_text(self._history[index])
        self.move_cursor(self.document.end)

    # -- text ------------------------------------------------------------------------------------------------------

    async def on_paste(self, event: events.Paste) -> None:
        event.prevent_default()  # a text area would insert it as well
        event.stop()
        self.paste(event.text)

    def paste(self, pasted: str) -> None:
        """Insert text; show a long one as a placeholder, which is sent whole."""
        text = sanitise(pasted)
        if len(text) > _BIG_PASTE:
            text = self._placeholder(text)
        self.type(text)

    def _placeholder(self, text: str) -> str:
        """Return a new placeholder for a text."""
        lines = counted(text.removesuffix("\n").count("\n") + 1, "line")
        label = _FOLDED.format(number=len(self._pastes) + 1, lines=lines, characters=len(text))
        self._pastes[label] = text
        return label

    def edit(self, edit: Edit) -> EditResult:
        """Keep placeholders whole: an edit of a part changes all of it, text typed into one comes after it."""
        if self._pastes:
            is_insertion = edit.top == edit.bottom
            start, end = self._around(edit.top)
            _, edit.to_location = self._around(edit.bottom)
            edit.from_location = end if is_insertion else start
        return super().edit(edit)

    def _around(self, location: Location) -> tuple[Location, Location]:
        """Return the ends of the placeholder around a place; twice the place itself, if there is none."""
        row, column = location
        if row >= self.document.line_count:  # a deletion of the last line ends after it
            return location, location
        for match in _LABEL.finditer(self.document.get_line(row)):
            if match.start() < column < match.end() and match[0] in self._pastes:
                return (row, match.start()), (row, match.end())
        return location, location

    def on_text_area_changed(self) -> None:
        self._offer()

    def on_text_area_selection_changed(self) -> None:
        self._offer()

    def _offer(self) -> None:
        """Let the menu show completions."""
        row, column = self.cursor_location
        before = self.text.split("\n")[: row + 1]
        if len(before) > row:
            before[row] = before[row][:column]
        self._menu.offer("\n".join(before))
