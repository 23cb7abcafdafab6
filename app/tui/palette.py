"""Entries of the command palette: actions with their keys, and themes.

All slash commands without an argument are entries by themselves; other actions are rows of `_BESIDE_COMMANDS`.

Guard: tests/tui/screens/test_dialogs.py.
"""

from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from headrace.app.chat.commands import COMMANDS

_BESIDE_COMMANDS = (  # title, key, help, action
    ("Widen or close the decode panel", "F3", "the panel beside the chat", "screen.panel"),
    ("Search the history of the prompt", "Ctrl+R", "earlier messages and commands", "screen.search_history"),
    ("Freeze the metrics, or unfreeze", "F7", "of the decode view", "app.freeze"),
    ("Export a trace of the latest turn", "Ctrl+X in F2", "for Perfetto", "app.export_trace"),
)
_CHAT_ONLY = ("screen.panel", "screen.search_history")


class _PaletteEntry(Struct, frozen=True):
    """An entry: its title and key, a sentence on it, and the function that carries it out."""

    title: str
    key: str
    help: str
    run: Callable[[], object]


class AppCommands(Provider):
    """Actions, found by a part of their title, name or help."""

    async def discover(self) -> Hits:
        for entry in self._offered():
            yield DiscoveryHit(_with_key(Content(entry.title), entry.key), entry.run, entry.title, entry.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self._offered():
            in_title = matcher.match(entry.title)
            in_help = matcher.match(entry.help)
            if in_title > 0 or in_help > 0:
                title = _with_key(matcher.highlight(entry.title), entry.key)
                yield Hit(max(in_title, in_help / 2), title, entry.run, entry.title, entry.help)

    def _offered(self) -> Iterator[_PaletteEntry]:
        """Yield the entries that can be carried out on this screen."""
        for command in COMMANDS:
            if not command.needs_argument:
                about = f"/{command.name}: {command.about}"
                yield _PaletteEntry(
                    command.title, command.key, about, partial(self._run, f"app.command({command.name!r})")
                )
        for title, key, about, action in _BESIDE_COMMANDS:
            if action not in _CHAT_ONLY or hasattr(self.screen, "action_panel"):
                yield _PaletteEntry(title, key, about, partial(self._run, action))
        yield _PaletteEntry("Change the theme", "", "choose the colours", self.app.search_themes)

    async def _run(self, action: str) -> None:
        await self.app.run_action(action)


def _with_key(title: Content, key: str) -> Content:
    return Content.assemble(title, "  ", (key, "$text-accent")) if key else title
