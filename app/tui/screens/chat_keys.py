"""Key bindings of the chat screen, and those that scroll transcripts from anywhere on a screen.

`do('NAME')` carries out a slash command. A new key is a row here, and a line of the help screen (`_KEYS` in
`help_screen.py`) and of docs/chat.md; the order is that of the key bar.

Guards: tests/tui/test_narrow.py.
"""

from collections.abc import Iterable

from textual.binding import Binding, BindingType

from headrace.app.tui.transcript.transcript import Transcript

SCROLL_KEYS: list[BindingType] = [
    Binding("pageup", "scroll_text('page_up')", "Page up", show=False, priority=True),
    Binding("pagedown", "scroll_text('page_down')", "Page down", show=False, priority=True),
    Binding("ctrl+home", "scroll_text('start')", "Top", show=False, priority=True),
    Binding("ctrl+end", "scroll_text('end')", "End", show=False, priority=True),
    Binding("ctrl+l", "app.redraw", "Redraw", show=False, priority=True),
]
"""For a screen whose `action_scroll_text` calls `scroll`."""

CHAT_KEYS: list[BindingType] = [
    Binding("escape", "stop", "Stop", key_display="Esc"),
    Binding("escape", "leave_edit", "Leave edit", key_display="Esc"),
    Binding("ctrl+c", "interrupt", "Stop", show=False),
    Binding("f8", "do('restart')", "Restart engine", key_display="F8"),
    Binding("f1", "app.show_keys", "Help", key_display="F1"),
    Binding("f2", "app.decode_view", "Decode", key_display="F2"),
    Binding("f3", "panel", "Panel", key_display="F3"),
    Binding("f4", "do('sessions')", "Sessions", key_display="F4"),
    Binding("f5", "do('model')", "Model", key_display="F5"),
    Binding("f6", "do('set')", "Settings", key_display="F6"),
    Binding("f7", "app.freeze", "Freeze", show=False),
    Binding("f9", "do('editor')", "Editor", show=False),
    Binding("ctrl+b", "do('regen')", "Again"),
    Binding("ctrl+r", "search_history", "Search the history", show=False),
    Binding("ctrl+s", "do('compare')", "Compare", show=False),
    Binding("ctrl+g", "do('continue')", "Continue", show=False),
    Binding("ctrl+n", "do('new')", "New", show=False),
    Binding("ctrl+o", "do('copy')", "Copy", show=False),
    Binding("ctrl+t", "do('think')", "Thinking", show=False),
    Binding("f12", "do('guesses')", "Draft tokens", key_display="F12", show=False),
    Binding("ctrl+up", "to_transcript", "Messages", show=False),
    Binding("ctrl+f", "do('find')", "Find", show=False, priority=True),
]


def scroll(transcripts: Iterable[Transcript], where: str) -> None:
    """Scroll transcripts. where: `page_up`, `page_down`, `start` or `end`."""
    for transcript in transcripts:
        if where in ("page_up", "page_down"):
            transcript.scroll_pages(-1 if where == "page_up" else 1)
        elif where == "start":
            transcript.action_to_start()
        else:
            transcript.to_end()
