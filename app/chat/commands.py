"""Slash commands: names, arguments, help lines, parsing."""

from dataclasses import dataclass

from headrace.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """argument: shown after the name in the help; "" for a command without one."""

    name: str
    help: str
    argument: str = ""
    key: str = ""

    @property
    def takes_argument(self) -> bool:
        return bool(self.argument)

    @property
    def needs_argument(self) -> bool:
        """Return True if the argument is required: optional ones stand in brackets."""
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = (
    Command("help", "keys and commands", key="F1"),
    Command("model", "switch the model, or pick one", "[NAME]", key="F5"),
    Command("system", "the system prompt; alone: all parameters", "[TEXT]"),
    Command("set", "set a parameter, as in /set temperature 0.7", "[NAME VALUE]", key="F6"),
    Command("queue", "edit the queued messages"),
    Command("schema", "answers fit a JSON schema; `object` for any object, `off`", "[FILE]"),
    Command("preset", "a system prompt with settings; save NAME keeps one", "[NAME]"),
    Command("file", "attach a text file", "PATH"),
    Command("regen", "answer the last question again", key="Ctrl+R"),
    Command("again", "2 to 8 more answers in one batch; take one", "N"),
    Command("continue", "continue a stopped answer", key="Ctrl+G"),
    Command("edit", "change your last message, or the answer; a new branch", "[answer]"),
    Command("summary", "edit the summary of messages left out, or undo", "[undo]"),
    Command("editor", "write in your editor ($VISUAL, $EDITOR)", key="F9"),
    Command("branch", "the next branch, or the one before", "[back]"),
    Command("tree", "all branches of this conversation"),
    Command("compare", "two answers side by side; MODEL, PRESET, NAME=VALUE", "[WITH]", key="Ctrl+S"),
    Command("delete", "remove the last message, for good"),
    Command("copy", "copy the last answer, or its code", "[code]", key="Ctrl+O"),
    Command("links", "open a link of the last answer in the browser"),
    Command("messages", "select a message; its keys are listed by F1", key="Ctrl+Up"),
    Command("find", "words in this conversation", "[WORDS]", key="Ctrl+F"),
    Command("new", "start a new session", key="Ctrl+N"),
    Command("sessions", "resume, rename, delete, export", key="F4"),
    Command("search", "search all sessions", "[WORDS]"),
    Command("rename", "rename this session", "TITLE"),
    Command("export", "this session into a .md, .html or .json file", "[FILE]"),
    Command("stats", "the decode view in full", key="F2"),
    Command("think", "show or hide thinking sections", key="Ctrl+T"),
    Command("guesses", "mark accepted and rejected draft tokens", key="F12"),
    Command("restart", "start the engine again", key="F8"),
    Command("quit", "quit", key="Ctrl+Q"),
)

_BY_NAME = {command.name: command for command in COMMANDS}


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed command line. command: None if unknown. rest: the text after the name."""

    name: str
    rest: str
    command: Command | None

    @property
    def argument(self) -> str:
        """Return the argument. Raises UsageError for a command that takes none."""
        if self.rest and self.command is not None and not self.command.takes_argument:
            raise UsageError(f"/{self.name} takes no argument; //{self.name} … is sent as a message")
        return self.rest


def parse_command(text: str) -> Invocation | None:
    """Parse a command line; None for an ordinary message. `//` starts a message with one slash.

    A path such as `/etc/hosts is empty` is no command: names have letters only. A `/file` line with more lines below it
    is a message with an attachment.
    """
    if not text.startswith("/") or text.startswith("//") or (text.startswith("/file ") and "\n" in text):
        return None
    name, _, rest = text[1:].partition(" ")
    name = name.strip()
    if not name.isalpha() or "\n" in name:
        return None
    return Invocation(name, rest.strip(), _BY_NAME.get(name))


def message_text(text: str) -> str:
    """Return a message's text: a leading `//` is one slash."""
    return text[1:] if text.startswith("//") else text


def matching(prefix: str) -> list[Command]:
    """Return the command of that name, then those that start with `prefix`, then those that contain it."""
    first = [command for command in COMMANDS if command.name.startswith(prefix)]
    first.sort(key=lambda command: command.name != prefix)
    return first + [command for command in COMMANDS if prefix in command.name and command not in first]
