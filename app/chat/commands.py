"""Slash commands: names, arguments, help lines, parsing."""

from dataclasses import dataclass

from headrace.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """argument: shown after the name in the help; "" for a command without one.

    aliases: other names of the command, mostly those that other programs use.
    """

    name: str
    help: str
    argument: str = ""
    key: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def about(self) -> str:
        """Return the help with the aliases."""
        aliases = ", ".join(f"/{alias}" for alias in self.aliases)
        return f"{self.help}; also {aliases}" if aliases else self.help

    @property
    def takes_argument(self) -> bool:
        return bool(self.argument)

    @property
    def needs_argument(self) -> bool:
        """Return True if the argument is required: optional ones stand in brackets."""
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = (
    Command("help", "keys and commands", key="F1", aliases=("?",)),
    Command("model", "switch the model, or pick one", "[NAME]", key="F5", aliases=("models",)),
    Command("system", "the system prompt; alone: all parameters", "[TEXT]"),
    Command("set", "set a parameter, as in /set temperature 0.7", "[NAME VALUE]", key="F6", aliases=("settings",)),
    Command("queue", "edit the queued messages"),
    Command("schema", "answers fit a JSON schema; `object` for any object, `off`", "[FILE]"),
    Command("preset", "a system prompt with settings; save NAME keeps one", "[NAME]"),
    Command("file", "attach a text file", "PATH"),
    Command("regen", "answer the last question again", key="Ctrl+B", aliases=("retry", "regenerate")),
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
    Command("new", "start a new session", key="Ctrl+N", aliases=("clear", "reset")),
    Command("sessions", "resume, rename, delete, export", key="F4"),
    Command("search", "search all sessions", "[WORDS]"),
    Command("rename", "rename this session", "TITLE"),
    Command("export", "this session into a .md, .html or .json file", "[FILE]"),
    Command("stats", "the decode view in full", key="F2"),
    Command("think", "show or hide thinking sections", key="Ctrl+T"),
    Command("guesses", "mark accepted and rejected draft tokens", key="F12"),
    Command("restart", "start the engine again", key="F8"),
    Command("quit", "quit", key="Ctrl+Q", aliases=("exit", "bye", "q")),
)

_BY_NAME = {name: command for command in COMMANDS for name in command.names}
_IN_OTHER_PROGRAMS = {  # names of commands of other programs: what does the same here
    "undo": "/delete removes the last message, /edit changes it",
    "theme": "Ctrl+P lists the themes",
    "history": "/sessions lists the earlier sessions, /search looks through them",
    "save": "sessions are saved as they grow; /export writes a file",
    "load": "/sessions opens an earlier session, /model loads another model",
    "show": "/system shows all parameters, /model the models",
}


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed command line. name: as typed. command: None if unknown. rest: the text after the name."""

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

    A path such as `/etc/hosts is empty` is no command: names are `?` or letters only. A `/file` line with more lines
    below it is a message with an attachment.
    """
    if not text.startswith("/") or text.startswith("//") or (text.startswith("/file ") and "\n" in text):
        return None
    name, _, rest = text[1:].partition(" ")
    name = name.strip()
    if not (name.isalpha() or name in _BY_NAME):
        return None
    return Invocation(name, rest.strip(), _BY_NAME.get(name))


def unknown_command(name: str) -> UsageError:
    """Return the error for an unknown command; its hint names the command that was probably meant."""
    from difflib import get_close_matches  # late: rarely needed

    near = get_close_matches(name, _BY_NAME, n=1)
    if name in _IN_OTHER_PROGRAMS:
        hint = _IN_OTHER_PROGRAMS[name]
    elif near:
        hint = f"did you mean /{near[0]}?"
    else:
        hint = "/help lists the commands"
    return UsageError(f"/{name}: unknown command", hint)


def message_text(text: str) -> str:
    """Return a message's text: a leading `//` is one slash."""
    return text[1:] if text.startswith("//") else text


def matching(prefix: str) -> list[Command]:
    """Return the command of that name or alias, then those that start with `prefix`, then those that contain it."""
    exact = [command for command in COMMANDS if prefix in command.names]
    starting = [command for command in COMMANDS if command.name.startswith(prefix)]
    aliased = [command for command in COMMANDS if any(alias.startswith(prefix) for alias in command.aliases)]
    containing = [command for command in COMMANDS if prefix in command.name]
    return list(dict.fromkeys([*exact, *starting, *aliased, *containing]))
