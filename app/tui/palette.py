"""The command palette's entries: the slash commands, by name and help."""

from textual.command import DiscoveryHit, Hit, Hits, Provider

from app.tui.commands import COMMANDS, Command


class AppCommands(Provider):
    """What can be done now, findable by typing a part of it."""

    async def discover(self) -> Hits:
        for command in _offered():
            yield DiscoveryHit(_title(command), lambda name=command.name: self._run(name), help=command.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in _offered():
            score = matcher.match(_title(command))
            if score > 0:
                yield Hit(
                    score,
                    matcher.highlight(_title(command)),
                    lambda name=command.name: self._run(name),
                    help=command.help,
                )

    def _run(self, name: str) -> None:
        from app.tui.chat_screen import ChatScreen

        for screen in self.app.screen_stack:
            if isinstance(screen, ChatScreen):
                screen.run_command(name, "")


def _offered() -> list[Command]:
    return [command for command in COMMANDS if command.name not in ("file", "rename")]


def _title(command: Command) -> str:
    return command.name.capitalize()
