"""Slash commands: the table of names, arguments and help lines, parsing, and what needs no screen.

Functions here change a conversation and return the lines to show. `IN_EVERY_CHAT` has the commands that need the
conversation and their argument only. Each surface has functions for the others, and replaces those to which it adds
something: `ACTIONS` of `app/line_chat/chat.py`, `commands` in `chat_actions.py` and `message_actions.py` of
`app/tui/screens/`.

Guards: tests/tui/test_parts.py for the parsing, tests/app/chat/test_commands.py for the table in docs/chat.md.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from headrace.app.answer.options import GRAMMARS, AnswerOptions
from headrace.app.answer.phrases import sampling_in_effect
from headrace.app.chat.attachments import parse_message, unquoted
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parameters import PARAMETERS, read_parameter, read_system, write_parameter
from headrace.app.config.bounded_input import is_schema, read_grammar_file
from headrace.app.sessions.records import Message
from headrace.runtime.errors import UsageError

Function = TypeVar("Function")
TWICE_S = 2.0
"""Seconds within which a second Ctrl-C at the prompt leaves a chat."""


class Command(Struct, frozen=True):
    """A slash command, without its function.

    name: without the slash.
    help: a line; its part before the first comma or semicolon is the title.
    argument: shown after the name in the help; "" for a command without one. In brackets: it is optional. In lower
        case: it is a word to be typed, and no other is accepted.
    key: of the full screen, for the help; "" without one.
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
    def usage(self) -> str:
        """Return the command as it is typed."""
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def title(self) -> str:
        """Return the help as the title of an action."""
        first = self.help.partition(";")[0].partition(",")[0]
        return first[:1].upper() + first[1:]

    @property
    def about(self) -> str:
        """Return the help with the aliases."""
        if not self.aliases:
            return self.help
        aliases = ", ".join(f"/{alias}" for alias in self.aliases)
        return f"{self.help}; also {aliases}"

    @property
    def needs_argument(self) -> bool:
        """Return True if the argument is required: optional ones stand in brackets."""
        return bool(self.argument) and not self.argument.startswith("[")


# In the order of the help. Each command needs a function in `IN_EVERY_CHAT` or in the table of a surface.
COMMANDS = (
    Command("help", "show the keys and commands", key="F1", aliases=("?",)),
    Command("model", "switch the model, or pick one", "[NAME]", key="F5", aliases=("models",)),
    Command("system", "set the system prompt; alone: all parameters", "[TEXT]"),
    Command("set", "set a parameter, as in /set temperature 0.7", "[NAME VALUE]", key="F6", aliases=("settings",)),
    Command("queue", "edit the queued messages"),
    Command("schema", "make answers fit a JSON schema; `object` for any object, `off`", "[FILE]"),
    Command("preset", "apply a system prompt with settings; save NAME keeps one", "[NAME]"),
    Command("file", "attach a text file", "PATH"),
    Command("regen", "answer the last question again", key="Ctrl+B", aliases=("retry", "regenerate")),
    Command("again", "2 to 8 more answers in one batch; take one", "N"),
    Command("continue", "continue a stopped answer", key="Ctrl+G"),
    Command("edit", "edit your last message, or the answer; a new branch", "[answer]"),
    Command("summary", "edit the summary of messages left out, or undo", "[undo]"),
    Command("editor", "write in your editor; $VISUAL or $EDITOR", key="F9"),
    Command("branch", "go to the next branch, or the one before", "[back]"),
    Command("tree", "show all branches of this conversation"),
    Command("compare", "compare two answers side by side; MODEL, PRESET, NAME=VALUE", "[WITH]", key="Ctrl+S"),
    Command("delete", "remove the last message, for good"),
    Command("copy", "copy the last answer, or its code", "[code]", key="Ctrl+O"),
    Command("links", "open a link of the last answer in the browser"),
    Command("messages", "select a message; F1 lists its keys", key="Ctrl+Up"),
    Command("find", "find words in this conversation", "[WORDS]", key="Ctrl+F"),
    Command("new", "start a new session", key="Ctrl+N", aliases=("clear", "reset")),
    Command("sessions", "open another session; resume, rename, delete, export", key="F4"),
    Command("search", "search all sessions", "[WORDS]"),
    Command("rename", "rename this session", "TITLE"),
    Command("export", "export this session; a .md, .html or .json file", "[FILE]"),
    Command("stats", "open the decode view in full", key="F2"),
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
_WITHOUT_SCREEN = {  # commands that need the full screen: what does the same without one
    "sessions": "outside of the chat, `headrace sessions list` lists them, `headrace chat --resume ID` opens one",
    "search": "outside of the chat, `headrace sessions search WORDS` does the same",
}


class Invocation(Struct, frozen=True):
    """A parsed command line.

    name: as typed.
    command: None if the name is unknown.
    rest: the text after the name.
    """

    name: str
    rest: str
    command: Command | None

    def function(self, functions: Mapping[str, Function]) -> Function:
        """Return the command's function, to be called with `rest`.

        functions: those of a surface, by the commands' names. Raises UsageError for an unknown command, one that the
        surface does not have, and a missing or a needless argument.
        """
        command = self.command
        if command is None:
            raise unknown_command(self.name)
        if command.name not in functions:
            hint = _WITHOUT_SCREEN.get(command.name, "/help lists the others")
            raise UsageError(f"/{self.name} needs the chat on a full screen", hint)
        if self.rest and not command.argument:
            raise UsageError(f"/{self.name} takes no argument; //{self.name} … is sent as a message")
        # An argument in lower case is the only word allowed: `[answer]` of /edit, `[back]` of /branch.
        is_other_word = bool(self.rest) and command.argument.islower() and self.rest != command.argument.strip("[]")
        if is_other_word or (command.needs_argument and not self.rest):
            raise UsageError(f"/{self.name} {command.argument}", command.about)
        return functions[command.name]


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
    """Return the commands for what was typed of a name, best first, each once.

    The order: that name or alias, names that start with `prefix`, aliases that do, names that contain it.
    """
    exact = [command for command in COMMANDS if prefix in command.names]
    starting = [command for command in COMMANDS if command.name.startswith(prefix)]
    aliased = [command for command in COMMANDS if any(alias.startswith(prefix) for alias in command.aliases)]
    containing = [command for command in COMMANDS if prefix in command.name]
    return list(dict.fromkeys([*exact, *starting, *aliased, *containing]))


# -- commands that need no screen --------------------------------------------------------------------------------------

_LATER = "from the next answer on"


def set_system(conversation: Conversation, text: str) -> str:
    """Set the system prompt; `none` removes it, and no text returns all parameters."""
    if not text:
        system = conversation.session.system or "none"
        return f"system prompt: {system}\n{set_parameter(conversation, '')}"
    conversation.branch.set_system(read_system(text))
    return f"system prompt set, {_LATER}"


def set_parameter(conversation: Conversation, assignment: str) -> str:
    """Set `NAME VALUE` or `NAME=VALUE`, or return the value of `NAME`, or of all parameters. Raises UsageError."""
    if not assignment:
        effective = conversation.effective
        return "\n".join(
            f"{parameter.name}: {write_parameter(parameter.name, effective) or 'not set'}"
            f" ({parameter.help}; {parameter.range})"
            for parameter in PARAMETERS
        )
    # `temperature=0.7`, `stop = a=b`: only the "=" right after the name stands for a space, a value may have one, too.
    name, _, value = re.sub(r"^([^\s=]+)\s*=", r"\1 ", assignment).partition(" ")
    if value.strip():
        conversation.branch.set_sampling({name.replace("-", "_"): read_parameter(name, value)})
        return f"{name}: {value.strip()}, {_LATER}"
    read_parameter(name, "")  # raises for an unknown name
    shown = write_parameter(name, conversation.session.sampling)
    return f"{name}: {shown or 'not set'}; in effect: {sampling_in_effect(conversation.effective)}"


def set_schema(conversation: Conversation, argument: str) -> str:
    """Set the JSON schema of the answers: a file's, a written one, or `off`; return it without an argument.

    Raises UsageError.
    """
    if not argument:
        schema = conversation.session.sampling.get("schema")
        if schema is None:
            return "no schema"
        return f"schema: {schema:.200}"
    if argument == "off":
        conversation.branch.set_sampling(dict.fromkeys(GRAMMARS))
        return f"no schema, {_LATER}"
    schema = argument
    if not is_schema(argument):
        schema = read_grammar_file(argument)
    options = AnswerOptions.read({"schema": schema})
    options.grammar_source()  # refused now, not at the next message
    # None removes the schema or grammar that was set before.
    conversation.branch.set_sampling(dict.fromkeys(GRAMMARS) | options.stored())
    return f"schema set, {_LATER}"


def preset_names() -> Sequence[str]:
    """Return the names of the presets."""
    from headrace.app.config.presets import load_presets  # not imported at the start

    return list(load_presets())


def use_preset(conversation: Conversation, argument: str) -> str:
    """Apply preset `NAME`, `save NAME` or `delete NAME`, or return all names. Raises UsageError."""
    if not argument:
        return f"presets: {', '.join(preset_names()) or 'none; /preset save NAME keeps these settings'}"
    from headrace.app.config.presets import Preset, chosen_preset, delete_preset, load_presets, save_preset

    session = conversation.session
    verb, _, name = argument.partition(" ")
    if name.strip() and verb == "save":
        save_preset(name.strip(), Preset(session.system, session.sampling))
        return f"preset {name.strip()} saved: this session's system prompt and settings"
    if name.strip() and verb == "delete":
        delete_preset(name.strip())
        return f"preset {name.strip()} deleted"
    preset = chosen_preset(load_presets(), argument)
    conversation.branch.set_system(preset.system)
    # None removes the settings that the preset does not have.
    conversation.branch.set_sampling(dict.fromkeys(session.sampling) | dict(preset.sampling))
    return f"preset {argument} applied, {_LATER}"


def switch_branch(conversation: Conversation, direction: str) -> str:
    """Activate the next alternative at the last fork, or with `back` the one before; the first follows the last.

    Raises UsageError if there is none.
    """
    for message in reversed(conversation.messages):
        branches = conversation.branch.alternatives(message.id)
        if len(branches.ids) > 1:
            step = -1 if direction == "back" else 1
            if not 0 <= branches.shown + step < len(branches.ids):  # from the last one to the first, or the reverse
                step = -step * (len(branches.ids) - 1)
            conversation.switch_branch(message.id, step)
            return ""  # nothing to show
    raise UsageError("there are no branches yet", "/regen and /edit make them")


def message_to_edit(conversation: Conversation, which: str) -> Message:
    """Return the last user message, or with `answer` the last answer. Raises UsageError."""
    if which == "answer":
        return conversation.branch.last("assistant")
    return conversation.branch.last("user")


def undo_trimming(conversation: Conversation) -> str:
    """Undo the latest change of the messages left out, and return the line to show. Raises UsageError."""
    conversation.undo_trimming()
    left_out = conversation.branch.not_sent
    if not left_out:
        return "all messages are sent again"
    return f"{left_out} messages are left out"


def summary_to_edit(conversation: Conversation) -> str:
    """Return the summary of the messages left out, "" if there is none. Raises UsageError if all are sent."""
    if not conversation.branch.not_sent:
        raise UsageError("all messages are sent: there is no summary")
    return conversation.session.summary


def last_message(conversation: Conversation) -> Message:
    """Return the last message. Raises UsageError."""
    if not conversation.messages:
        raise UsageError("the conversation is empty")
    return conversation.messages[-1]


def attach(path: str) -> tuple[str, str]:
    """Return the line that attaches a path's files to a message, and their name or number. Raises UsageError."""
    line = f"/file {path}\n"
    _, attachments = parse_message(line)
    if len(attachments) == 1:
        return line, attachments[0].name
    return line, f"{len(attachments)} files"


def export_session(conversation: Conversation, session_id: str, name: str) -> str:
    """Write this session or another one to a file; see `app.sessions.export.export_path` for `name`.

    Raises UsageError, SessionError.
    """
    from headrace.app.sessions.export import write_export  # not imported at the start

    if session_id == conversation.session.id:
        conversation.settle()
    return f"wrote {write_export(conversation.store, session_id, name)}"


def _rename(conversation: Conversation, title: str) -> str:
    conversation.branch.rename(title)
    return ""  # nothing to show


def _export(conversation: Conversation, name: str) -> str:
    return export_session(conversation, conversation.session.id, unquoted(name))


IN_EVERY_CHAT: Mapping[str, Callable[[Conversation, str], str]] = {
    "system": set_system,
    "set": set_parameter,
    "schema": set_schema,
    "preset": use_preset,
    "branch": switch_branch,
    "rename": _rename,
    "export": _export,
}
"""Commands by name that need the conversation and their argument only. Each returns the lines to show."""
