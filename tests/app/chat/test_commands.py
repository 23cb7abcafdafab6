"""docs/chat.md lists every slash command, as the table of commands has it."""

from pathlib import Path

from headrace.app.chat.commands import COMMANDS
from headrace.app.line_chat.chat import ACTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "chat.md"


def test_the_chats_page_lists_every_slash_command_with_its_help() -> None:
    rows = []
    for command in COMMANDS:
        aliases = ", ".join(f"`/{alias}`" for alias in command.aliases)
        without_screen = "yes" if command.name in ACTIONS else ""
        cells = [f"`{command.usage}`", command.help, command.key, aliases, without_screen]
        rows.append(f"| {' | '.join(cells)} |")
    table = PAGE.read_text(encoding="utf-8").partition("\n## Commands\n")[2].partition("\n## ")[0]
    listed = [line for line in table.splitlines() if line.startswith("| `/")]
    assert listed == rows, "docs/chat.md needs these rows:\n" + "\n".join(rows)
