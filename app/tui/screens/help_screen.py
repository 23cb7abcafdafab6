"""Help screen of F1: the keys of the screen below it, then all keys and commands.

`_KEYS` is written by hand: a changed key is changed there, too. Keys of other screens come from their bindings
(`keys_of`), commands from `COMMANDS`, explanations of figures from assets/explain.toml.

Guard: tests/tui/test_reach.py.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from headrace.app.chat.commands import COMMANDS
from headrace.app.output.explanations import FIELDS, Explanation
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal

_SIDE_BY_SIDE = 110  # cells from which keys and commands stand next to each other
_WIDE = 136  # cells of the dialog with two columns, as headrace.tcss has them
_NARROW = 68  # the same with one column
_OF_TEXTUAL = ("app.focus_next", "app.focus_previous", "screen.copy_text")
_GAP = 2  # cells between a key and its description
_LEAST_TEXT = 16  # cells of a description that stands right of its key
# Sections of keys: title, then (key, description).
_KEYS = (
    (
        "writing",
        (
            ("Enter", "send"),
            ("Ctrl+J, Shift+Enter", "new line"),
            ("Up, Down", "history (on the first, last line)"),
            ("Ctrl+R", "search the history; Enter takes an entry"),
            ("Enter, in an answer", "queue the message"),
            ("Ctrl+_, Ctrl+Y", "undo, redo"),
            ("F9", "write in your editor"),
            ("/", "commands; Tab or Enter takes the marked one"),
            ("@path, /file path", "attach a text file"),
            ("Esc, Ctrl+C", "stop the answer; its text stays"),
            ("Ctrl+C", "clear the prompt; ↑ brings it back"),
            ("Ctrl+Q, Ctrl+D", "quit; so does Ctrl+C twice"),
        ),
    ),
    (
        "reading",
        (
            ("PgUp, PgDn, wheel", "scroll; at the end, follow the text"),
            ("Ctrl+Home, Ctrl+End", "to the top, to the end"),
            ("Ctrl+F", "find in the conversation; ↑ ↓ other matches"),
            ("Ctrl+Up", "select messages, then:"),
            ("↑ ↓", "another message"),
            ("c  b", "copy it, copy one of its code blocks"),
            ("o", "open one of its links in the browser"),
            ("e  r  n  d", "edit, regenerate, continue, delete"),
            ("[  ]", "the branch before, after; or click ‹1/2›"),
            ("Enter", "fold or unfold a summary, thinking"),
            ("u", "on a summary: undo it, send all again"),
            ("Esc", "back to the input"),
        ),
    ),
    (
        "comparing (Ctrl+S, /compare)",
        (
            ("Enter", "ask both; A answers, then B; then the queue"),
            ("Esc", "stop the answer; then: take one"),
            ("Ctrl+B", "both answer again"),
            ("F3", "the other side, where one shows at a time"),
        ),
    ),
    (
        "several answers (/again 4)",
        (
            ("1 to 8, ← →, click", "choose one; ↑ ↓ scroll it"),
            ("Enter", "take it; the others stay as branches"),
            ("Esc, Ctrl+C", "stop all; then Esc: take none"),
            ("F2", "sequences, batch size, K/V pool"),
        ),
    ),
    (
        "screens",
        (
            ("F2", "decode view in full"),
            ("F3", "decode panel: off, narrow, wide (or drag its edge)"),
            ("F4  F5  F6", "sessions, models, settings of this session"),
            ("F7", "freeze the metrics, or unfreeze"),
            ("Ctrl+X, in F2", "export a trace of the latest turn"),
            ("F8", "start the engine again"),
            ("Ctrl+P", "command palette, themes"),
            ("Ctrl+Z", "suspend; `fg` comes back"),
            ("Ctrl+L", "redraw the screen"),
        ),
    ),
)


_KEY_CELLS = _GAP + max(
    *(len(key) for _, keys in _KEYS for key, _ in keys),
    *(len(command.usage) for command in COMMANDS),
)


class HelpScreen(SingleDismissal, ModalScreen[None]):
    """Esc, F1, q and Ctrl+C close it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q,ctrl+c", "dismiss", "Close", priority=True)]

    def __init__(
        self, keys: Sequence[tuple[str, str]] = (), figures: Sequence[Explanation] = (), why: str = ""
    ) -> None:
        """Show keys and explanations.

        keys: of the screen below, with descriptions; empty for the chat, where all are.
        figures: explained in the place of all other keys and commands.
        why: sentences on the current figures, above the keys.
        """
        super().__init__()
        self._here = [("this screen", keys)] if keys else []
        self._figures = figures
        self._why = why

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -large", id="help") as box:
            box.border_title = Content("keys and figures" if self._figures else "keys and commands")
            box.border_subtitle = Content("Esc closes")
            yield Static(id="help-keys", markup=False)
            yield Static(id="help-commands", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        """Lay out two columns if they fit."""
        columns = event.size.width >= _SIDE_BY_SIDE
        self.query_one("#help").set_class(columns, "-columns")
        # Cells of a column. The dialog takes at most 98 % of the screen with two columns, else 94 %: 3 or 4 cells less
        # at these widths. Of it, the frame takes 2 cells, the padding 4, the scroll bar 2; the rest is air.
        if columns:
            width = (min(_WIDE, event.size.width - 3) - 12) // 2
        else:
            width = min(_NARROW, event.size.width - 4) - 10
        if self._figures:
            keys = _keys(self._here, width)
            commands = _explained(self._figures, width)
        else:
            keys = _keys([*self._here, *_KEYS], width)
            commands = _commands(width)
        if self._why:  # above the keys: they fill the first screen of a small window
            head = [Content.styled("now", "bold $text-primary"), *Content(self._why).wrap(width), Content("")]
            keys = Content("\n").join([*head, keys])
        self.query_one("#help-keys", Static).update(keys)
        self.query_one("#help-commands", Static).update(commands)


def keys_of(screen: Screen[Any]) -> list[tuple[str, str]]:
    """Return the keys of a screen, with their descriptions, without textual's own."""
    keys: dict[str, str] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        if active.node is screen and binding.description and binding.action not in _OF_TEXTUAL:
            keys.setdefault(binding.description, screen.app.get_key_display(binding))
    return [(key, description) for description, key in keys.items()]


def _keys(sections: Sequence[tuple[str, Sequence[tuple[str, str]]]], width: int) -> Content:
    lines: list[Content] = []
    for title, keys in sections:
        lines += [Content.styled(title, "bold $text-primary"), *(_entry(key, text, "", width) for key, text in keys)]
        lines.append(Content(""))
    return Content("\n").join(lines)


def _explained(figures: Sequence[Explanation], width: int) -> Content:
    """Return the sentence and the other fields of each figure."""
    lines: list[Content] = []
    for each in figures:
        lines += [Content.styled(each.name, "bold $text-primary"), *Content(each.sentence).wrap(width)]
        for field, title in FIELDS:
            text = Content.assemble((f"{title}: ", "$quiet"), getattr(each, field))
            lines += text.wrap(width)
        lines.append(Content(""))
    return Content("\n").join(lines)


def _commands(width: int) -> Content:
    lines = [Content.styled("commands", "bold $text-primary")]
    for command in COMMANDS:
        lines.append(_entry(command.usage, command.about, command.key, width))
    return Content("\n").join(lines)


def _entry(key: str, text: str, shortcut: str, width: int) -> Content:
    """Return a key or command at the left and its description at the right, or below it without room."""
    about = Content.assemble(text, (f"  {shortcut}" if shortcut else "", "$quiet"))
    if width < _KEY_CELLS + _LEAST_TEXT:
        below = about.wrap(width - _GAP)
        return Content("\n").join([Content.styled(key, "bold $text-accent"), *(line.pad_left(_GAP) for line in below)])
    first, *rest = about.wrap(width - _KEY_CELLS)
    head = Content.assemble((f"{key:<{_KEY_CELLS}}", "bold $text-accent"), first)
    return Content("\n").join([head, *(line.pad_left(_KEY_CELLS) for line in rest)])
