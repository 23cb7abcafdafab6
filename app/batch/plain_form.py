"""The plain form: a prompt as `headrace run` takes it, or messages, with options of the line's own."""

from collections.abc import Mapping
from typing import Any

from headrace.app.answer.options import OPTIONS
from headrace.app.batch.fields import (
    TOOLS,
    conversation,
    flag,
    line_tools,
    prompt_text,
    read_options,
    refuse_unknown,
    system_message,
    text,
)
from headrace.app.batch.line import Asked, Defaults
from headrace.runtime.errors import UsageError

_PLAIN = OPTIONS.keys() | TOOLS | {"id", "prompt", "messages", "system", "raw"}


def read_plain(given: Mapping[str, Any], defaults: Defaults) -> Asked:
    """Return a line's request. Raises UsageError."""
    refuse_unknown(given, frozenset(_PLAIN))
    given = {key: value for key, value in given.items() if value is not None}
    options = read_options(given)
    if ("prompt" in given) == ("messages" in given):
        raise UsageError("a line needs a prompt or messages, one of them")
    system = text("system", given["system"]) if "system" in given else None
    raw = flag("raw", given["raw"]) if "raw" in given else defaults.raw
    if "messages" in given:
        if system is not None or given.get("raw"):
            raise UsageError("system and raw go with a prompt, not with messages")
        return Asked(conversation(given["messages"], defaults.system), options, line_tools(given))
    prompt = prompt_text(given["prompt"])
    if raw:
        if system is not None or options.thinking is not None or given.keys() & TOOLS:
            raise UsageError("raw excludes a system message, thinking and tools")
        return Asked(prompt, options)
    first = system_message(defaults.system if system is None else system)
    return Asked([*first, {"role": "user", "content": prompt}], options, line_tools(given))
