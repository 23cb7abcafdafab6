"""Completion menu above the prompt, for commands, arguments of `/compare`, and paths. The prompt keeps the focus.

`Prompt` offers the text before its cursor with every key, and passes on the keys that move and take an entry. Entries
come from `_entries`; a new kind is a case there. Paths are read at once, so one folder is read, and part of it.
tests/tui/test_chat.py and test_parts.py guard this.
"""

import os
import re
import shlex
from pathlib import Path

from msgspec import Struct
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from headrace.app.chat.commands import matching
from headrace.app.config.settings import SAMPLING_ROWS
from headrace.runtime.errors import HeadraceError

_COMPARE = "/compare "
_HELP_AT = 24  # cells of a command's name and argument
_MAX_ENTRIES = 200  # of a directory that are looked at
_MAX_PATHS = 8  # in the menu
_AT_PATH = re.compile(r'(?:^|\s)@("[^"]*|[^\s"]*)$')  # see @src/ma, or @"my fi
_FILE_PATH = re.compile(r'^/file[ \t]+("[^"]*|[^"]*)$')  # /file src/ma, or /file "my fi


class CompletionEntry(Struct, frozen=True):
    """An entry of the menu."""

    line: Content  # as it is shown
    insert: str  # replaces the text before the cursor
    replace: int  # characters of that text
    run: bool = False  # Enter also sends it


class CompletionMenu(OptionList, can_focus=False):
    """Hidden while there is nothing to complete."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._choices: list[CompletionEntry] = []
        self._completed = ""  # the text that the entries complete
        self._has_moved = False  # to an entry, with a key

    @property
    def is_open(self) -> bool:
        return bool(self._choices)

    @property
    def takes_enter(self) -> bool:
        """True if Enter takes an entry: after a folder (`@src/`), only one that was moved to."""
        return self.is_open and (self._has_moved or not (typed_path(self._completed) or "").endswith("/"))

    def offer(self, before_cursor: str) -> None:
        """Show completions of the text before the cursor."""
        if before_cursor == self._completed:
            return
        self._completed = before_cursor
        self._has_moved = False
        was_open = self.is_open
        self._choices = _entries(before_cursor, max(20, self.screen.size.width - 8))
        if not self.is_open and not was_open:
            return  # nothing to lay out: this is called with every key
        self.clear_options()
        self.add_options(Option(entry.line) for entry in self._choices)
        self.display = self.is_open
        if self.is_open:
            self.highlighted = 0

    def close(self) -> None:
        self._choices = []
        self.display = False

    def move(self, by: int) -> None:
        """Highlight the entry above or below."""
        if self._choices:
            self._has_moved = True
            self.highlighted = ((self.highlighted or 0) + by) % len(self._choices)

    def accept(self) -> CompletionEntry | None:
        """Close the menu and return the highlighted entry."""
        if not self._choices:
            return None
        choice = self._choices[self.highlighted or 0]
        self.close()
        return choice


def _entries(before: str, width: int) -> list[CompletionEntry]:
    """Return the menu's entries, the best first.

    before: text before the cursor.
    width: cells of a line.
    """
    path = typed_path(before)
    if path is not None:
        paths = [name for name in completions(path) if name != path.removeprefix('"')]  # nothing to add: Enter sends
        return [CompletionEntry(Content(name), as_typed(name, path), len(path)) for name in paths]
    if before.startswith(_COMPARE) and "\n" not in before:
        word = before.rpartition(" ")[2]
        names = [name for name in _compare_arguments() if name.startswith(word) and name != word]
        return [CompletionEntry(Content(name), name, len(word)) for name in names]
    name = before.removeprefix("/")
    if before.startswith("/") and (not name or name.isalpha()):
        entries = []
        for command in matching(name):
            line = Content.assemble(
                (f"/{command.name}", "bold $text-primary"),
                (f" {command.argument}".ljust(max(1, _HELP_AT - len(command.name))), "$quiet"),
                command.help,
                (f"  {command.key}".rstrip(), "$text-accent"),
            )
            insert = f"/{command.name}"
            if command.argument:
                insert += " "
            line = line.truncate(width, ellipsis=True)
            entries.append(CompletionEntry(line, insert, len(before), run=not command.needs_argument))
        return entries
    return []


def _compare_arguments() -> list[str]:
    """Return arguments of `/compare`: installed models, presets, settings."""
    from headrace.app.config.presets import load_presets
    from headrace.models.registry.store import Store

    try:
        presets = [f"preset={shlex.quote(name)}" for name in load_presets()]
    except HeadraceError:  # reported when a preset is applied
        presets = []
    try:
        models = Store().names()
    except HeadraceError:  # `headrace doctor` reports an unreadable folder
        models = []
    return [*models, *presets, *(f"{name}=" for name in SAMPLING_ROWS), "system=", "model="]


# -- paths: after `@` or `/file `, also in quotes; one directory is read ---------------------------------------------


def typed_path(before_cursor: str) -> str | None:
    """Return the unfinished path before the cursor, with its opening quote; None if there is none."""
    line = before_cursor.rpartition("\n")[2]
    match = _FILE_PATH.match(line) or _AT_PATH.search(line)
    return match[1] if match else None


def as_typed(path: str, typed: str) -> str:
    """Return `path` in the form of `typed`: quoted if needed, without the closing quote while it can continue."""
    quote = ""
    if typed.startswith('"') or " " in path:
        quote = '"'
    if path.endswith("/"):
        return f"{quote}{path}"
    return f"{quote}{path}{quote} "


def completions(typed: str) -> list[str]:
    """Return paths that continue `typed_path`'s result. Folders end with a slash; hidden files need a dot."""
    head, tail = os.path.split(typed.removeprefix('"'))
    matches: list[tuple[bool, str]] = []
    try:
        folder = Path(head or ".").expanduser()
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
                if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail.startswith(".")):
                    continue
                if not entry.name.isprintable():
                    continue
                path = os.path.join(head, entry.name)  # noqa: PTH118 (keeps `./` and `~` as they were typed)
                if entry.is_dir():
                    matches.append((False, f"{path}/"))  # folders go first
                else:
                    matches.append((True, path))
    except (OSError, RuntimeError, ValueError):  # no such folder, a home that nobody has, a NUL
        return []
    return [name for _, name in sorted(matches)[:_MAX_PATHS]]
