"""Slash commands that need no screen. Each changes a conversation and returns the line to show."""

from collections.abc import Sequence

from headrace.app.answer.options import GRAMMARS, AnswerOptions
from headrace.app.answer.phrases import sampling_in_effect
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parameters import read_parameter, write_parameter
from headrace.app.config.grammar_file import is_schema, read_grammar_file
from headrace.app.sessions.records import Message, Role
from headrace.runtime.errors import UsageError

_LATER = "from the next answer on"


def set_system(conversation: Conversation, text: str) -> str:
    """Set the system prompt; `none` removes it."""
    conversation.branch.set_system("" if text == "none" else text)
    return f"system prompt set, {_LATER}"


def set_parameter(conversation: Conversation, assignment: str) -> str:
    """Set `NAME VALUE` or `NAME=VALUE`, or return the value of `NAME`. Raises UsageError."""
    name, _, value = assignment.replace("=", " ", 1).partition(" ")
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
        return "no schema" if schema is None else f"schema: {schema:.200}"
    if argument == "off":
        conversation.branch.set_sampling(dict.fromkeys(GRAMMARS))
        return f"no schema, {_LATER}"
    options = AnswerOptions.read({"schema": argument if is_schema(argument) else read_grammar_file(argument)})
    options.grammar_source()  # refused now, not at the next message
    conversation.branch.set_sampling(dict.fromkeys(GRAMMARS) | options.stored())
    return f"schema set, {_LATER}"


def preset_names() -> Sequence[str]:
    """Return the names of the presets."""
    from headrace.app.config.presets import load_presets  # not imported at the start

    return list(load_presets())


def use_preset(conversation: Conversation, argument: str) -> str:
    """Apply preset `NAME`, `save NAME` or `delete NAME`. Raises UsageError."""
    from headrace.app.config.presets import Preset, delete_preset, load_presets, save_preset

    session = conversation.session
    verb, _, name = argument.partition(" ")
    if name.strip() and verb == "save":
        save_preset(name.strip(), Preset(session.system, session.sampling))
        return f"preset {name.strip()} saved: this session's system prompt and settings"
    if name.strip() and verb == "delete":
        delete_preset(name.strip())
        return f"preset {name.strip()} deleted"
    presets = load_presets()
    if argument not in presets:
        raise UsageError(f"no preset called {argument!r}", "one of " + ", ".join(presets) if presets else None)
    conversation.branch.set_system(presets[argument].system)
    conversation.branch.set_sampling(dict.fromkeys(session.sampling) | dict(presets[argument].sampling))
    return f"preset {argument} applied, {_LATER}"


def switch_branch(conversation: Conversation, direction: str) -> None:
    """Activate the next alternative at the last fork, or with `back` the one before; the first follows the last.

    Raises UsageError if there is none.
    """
    for message in reversed(conversation.messages):
        branches = conversation.branch.alternatives(message.id)
        if len(branches.ids) > 1:
            step = -1 if direction == "back" else 1
            if not 0 <= branches.shown + step < len(branches.ids):
                step = -step * (len(branches.ids) - 1)
            conversation.switch_branch(message.id, step)
            return
    raise UsageError("there are no branches yet", "/regen and /edit make them")


def message_to_edit(conversation: Conversation, which: str) -> Message:
    """Return the last user message, or with `answer` the last answer. Raises UsageError."""
    role: Role = "assistant" if which == "answer" else "user"
    message = next((message for message in reversed(conversation.messages) if message.role == role), None)
    if message is None:
        raise UsageError("there is nothing to edit yet")
    return message


def undo_trimming(conversation: Conversation) -> str:
    """Undo the latest change of the messages left out."""
    conversation.undo_trimming()
    left = conversation.branch.not_sent
    return f"{left} messages are left out" if left else "all messages are sent again"
