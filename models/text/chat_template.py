"""Rendering of chat messages to prompt text with a checkpoint's template.

`control_tokens` decides which spans become control tokens. `template_process` runs the template, in a process of its
own.

Guard: tests/models/text/test_chat_template.py.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from headrace.models.checkpoint.side_file import has_side_file, read_json_object, read_side_file
from headrace.models.text.template_process import SECONDS, render_template, variables_of
from headrace.models.text.template_text import TemplateText
from headrace.runtime.errors import CheckpointError, UsageError

_MAX_BYTES = 1 << 20  # of a file; `template_process` accepts far less

Message = Mapping[str, object]  # {"role": ..., "content": str | list of parts, ...} as in the OpenAI chat API

# Variables of every template, and those that `template_rules` fills.
_COMMON_VARIABLES = frozenset(["messages", "tools", "documents", "add_generation_prompt", "functions", "datetime"])

_PROBE = "probeone"  # a message's text
_PROBE_SECONDS = 0.2  # of processor time: templates take 0.1 ms for a message

# Processor time on top of the limit for a short conversation. Most templates take 0.1 ms per message; those that walk
# all messages for each one take 10 ms at 1,000 rounds. Templates walk the schema of each tool.
_SECONDS_PER_MESSAGE = 0.02
_SECONDS_PER_TOOL = 0.03

# A closed list of texts that count as the template's own, since templates paste the role between the halves of a
# control token (`<|` + role + `|>`).
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})

# Vocabularies without these tokens. Templates that add them to a text fail where they are undefined.
_NO_TOKENS = {"bos_token": "", "eos_token": ""}


class ChatTemplate:
    """The named templates of one checkpoint: `default`, and sometimes `tool_use`."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> None:
        """Check and compile nothing yet.

        special_tokens: variables with which templates write control tokens: bos_token, eos_token, ...
        seconds: of processor time for a short conversation; others get more
        """
        if not sources:
            raise CheckpointError("a chat template needs at least one source")
        self.sources = dict(sources)
        named = {**_NO_TOKENS, **(special_tokens or {})}
        self._special_tokens = {name: TemplateText(text) for name, text in named.items()}
        self._seconds = seconds

    def compile(self) -> None:
        """Compile the default template, for example on a thread while weights load."""
        variables_of(self._source(None))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the sources read, without those of every template."""
        read = (variables_of(source) for source in self.sources.values())
        names: frozenset[str] = frozenset().union(*read)
        return names - _COMMON_VARIABLES - self._special_tokens.keys()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> TemplateText:
        """Return the prompt text of a conversation, in which plain texts of messages, tools and variables are outside.

        Raises UsageError for malformed messages, CheckpointError if the template fails or is refused.
        """
        plain = _plain_messages(messages)
        offered = None if tools is None else _plain_data(tools)
        given = {
            **self._special_tokens,
            "documents": None,
            **{name: _plain_data(value) for name, value in variables.items()},
            "tools": offered,
            "add_generation_prompt": add_generation_prompt,
            "messages": [_with_parts(message) for message in plain] if self._wants_parts else plain,
        }
        more_seconds = _SECONDS_PER_MESSAGE * len(messages) + _SECONDS_PER_TOOL * len(tools or ())
        return render_template(self._source(offered), given, self._seconds + more_seconds)

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template shows contents as lists of parts alone: those of models for images, such as Idefics."""
        message = {"role": TemplateText("user"), "content": _PROBE}
        return not self._shows_probe(message) and self._shows_probe(_with_parts(message))

    def _shows_probe(self, message: Message) -> bool:
        """Return whether the template shows a message with the text _PROBE."""
        given = {**self._special_tokens, "documents": None, "tools": None, "messages": [message]}
        seconds = min(self._seconds, _PROBE_SECONDS)
        try:
            return _PROBE in render_template(self._source(None), given, seconds)
        except CheckpointError:
            return False

    def _source(self, tools: object) -> str:
        """Return the template for a conversation with these tools, or without any."""
        if tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        return next(iter(self.sources.values()))


def read_sources(directory: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Return the named template sources of a checkpoint directory; empty if it has none.

    Precedence as in transformers: chat_template.jinja, additional_chat_templates/*.jinja, chat_template.json, then
    `chat_template` of tokenizer_config.json, a string or a list of {name, template}.
    """
    sources: dict[str, str] = {}
    if has_side_file(file := directory / "chat_template.jinja"):
        sources["default"] = _read_text(file, directory)
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = _read_text(file, directory)
    if sources:
        return sources
    declared = tokenizer_config.get("chat_template")
    if has_side_file(file := directory / "chat_template.json"):
        if "chat_template" not in (content := read_json_object(file)):
            raise CheckpointError(f"{file.name} is not a chat template file")
        declared = content["chat_template"]
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in declared}
        except (TypeError, KeyError) as error:
            raise CheckpointError("the list of chat templates has an entry without name or template") from error
    if declared is not None:
        raise CheckpointError("chat_template is neither a text nor a list of named templates")
    return {}


def _read_text(file: Path, directory: Path) -> str:
    """Return a template's source. Raises CheckpointError for one that cannot be read, or is too large."""
    try:
        return read_side_file(file, _MAX_BYTES, directory).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be read as text") from error


def check_roles(messages: Sequence[Message]) -> None:
    """Raise UsageError for an empty conversation and for a message without a role that templates know."""
    if not messages:
        raise UsageError("a chat needs at least one message")
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise UsageError(f"unknown chat role {role!r}", hint="known roles: " + ", ".join(sorted(ROLES)))


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Copy messages to plain data without None values, which templates would print as "None".

    The content of a message with calls stays: some templates show calls only beside None.
    """
    check_roles(messages)
    plain = []
    for message in messages:
        has_calls = bool(message.get("tool_calls"))
        fields = {
            key: _plain_data(value)
            for key, value in message.items()
            if value is not None or (key == "content" and has_calls)
        }
        plain.append({**fields, "role": TemplateText(str(message["role"]))})
    return plain


def _with_parts(message: Message) -> dict[str, object]:
    """Return a message with its text as a list of one part."""
    content = message.get("content")
    parts = content
    if isinstance(content, str):
        parts = [{"type": TemplateText("text"), "text": content}]
    return {**message, "content": parts}


def _plain_data(value: object) -> object:
    """Copy plain JSON data; other objects have methods that a sandbox must not reach."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain_data(item) for item in value]
    raise UsageError(f"a chat contains a {type(value).__name__}, which is not JSON data")
