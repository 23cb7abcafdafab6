"""The plain form: a prompt as `headrace run` takes it, or messages, with options of the line's own."""

from collections.abc import Mapping
from typing import Any

from headrace.app.batch.line import Defaults
from headrace.app.batch.messages import conversation, opened_by
from headrace.app.batch.options import OPTIONS, flag, read_options, refuse_unknown, text
from headrace.runtime.errors import UsageError

_PLAIN = OPTIONS | {"id", "prompt", "messages", "system", "raw"}


def read_plain(told: Mapping[str, Any], defaults: Defaults) -> tuple[list[dict[str, str]] | None, str, dict[str, Any]]:
    """(messages or None, the text to continue, options) of a line in this form. Raises UsageError."""
    refuse_unknown(told, _PLAIN)
    told = {key: value for key, value in told.items() if value is not None}
    options = read_options(told)
    if ("prompt" in told) == ("messages" in told):
        raise UsageError("a line needs a prompt or messages, one of them")
    system = text("system", told["system"]) if "system" in told else None
    raw = flag("raw", told["raw"]) if "raw" in told else defaults.raw
    if "messages" in told:
        if system is not None or told.get("raw"):
            raise UsageError("system and raw go with a prompt, not with messages")
        return conversation(told["messages"], defaults.system), "", options
    prompt = text("prompt", told["prompt"])
    if raw:
        if system is not None or "thinking" in told:
            raise UsageError("raw has no place for a system message, nor for thinking")
        return None, prompt, options
    opening = opened_by(defaults.system if system is None else system)
    return [*opening, {"role": "user", "content": prompt}], "", options
