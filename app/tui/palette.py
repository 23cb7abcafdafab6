"""The command palette's entries: the slash commands, by name and help, and the themes."""

from collections.abc import Callable, Iterator
from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from headrace.app.tui.input.commands import COMMANDS

_NEED_TEXT = ("file", "rename")  # of no use without an argument


class AppCommands(Provider):
    """What can be done now, findable by typing a part of it."""

    async def discover(self) -> Hits:
        for title, help_text, run in self._offered():
            yield DiscoveryHit(title, run, help=help_text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, help_text, run in self._offered():
            score = matcher.match(title)
            if score > 0:
                yield Hit(score, matcher.highlight(title), run, help=help_text)

    def _offered(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for command in COMMANDS:
            if command.name not in _NEED_TEXT:
                yield command.name.capitalize(), command.help, partial(self._run, command.name)
        yield "Theme", "choose the colours", self.app.search_themes

    async def _run(self, name: str) -> None:
        await self.app.run_action(f"app.command({name!r})")
