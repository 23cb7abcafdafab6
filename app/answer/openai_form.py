"""OpenAI's chat completions and completions: bodies of requests as calls, and the choices of their answers.

Bodies of the server and of a batch's lines are read here, and their documents have these choices. A new field is read
by `read_chat` or `read_completion`, and its name stands in `CHAT_FIELDS` or `COMPLETION_FIELDS`: a batch refuses all
others. A field that would change the answer and is not supported stands in `REFUSED`. Source of the shapes: OpenAI's
API reference, sections Chat and Completions.

Guards: tests/app/answer/test_tools.py, tests/app/batch/test_parse.py and tests/app/server/test_openai.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.app.answer import MAX_RUNNING
from headrace.app.answer.call import EFFORTS, Call
from headrace.app.answer.fields import Body, answer_options, flag, mapping, read, refuse
from headrace.app.answer.messages import read_messages, tool_call
from headrace.app.answer.options import OPTIONS
from headrace.app.answer.response_format import format_options
from headrace.app.answer.token_reports import chat_logprobs, read_logprobs, text_logprobs
from headrace.app.answer.tools import custom_input, tool_fields
from headrace.app.answer.usage import finish_reason
from headrace.models.text.events import TokenReport
from headrace.runtime.config.value_types import OneOf, Text, Whole, shown
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import UsageError

MAX_CHOICES = MAX_RUNNING
"""Answers to one request: as many as the engine runs at a time by default."""
MAX_LOGPROBS = 5  # of completions, as in OpenAI's API
# Other names of options: OpenAI's newer one, and llama.cpp's.
_ALIASES = {"max_completion_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Fields of OpenAI's API, of vLLM's and of llama.cpp's server: each changes the answer. Values that do not are neutral.
REFUSED = frozenset({
    "functions", "function_call", "audio", "web_search_options", "best_of", "echo", "use_beam_search",
    "length_penalty", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "documents", "mirostat",
    "typical_p", "tfs_z",
    "top_n_sigma", "xtc_probability", "dry_multiplier", "dynatemp_range", "chat_template", "logits_processors",
})  # fmt: skip
# Values of these fields that change nothing.
_NEUTRAL: Mapping[str, float] = {"best_of": 1, "typical_p": 1, "tfs_z": 1, "length_penalty": 1, "top_n_sigma": -1}
_FIELDS = {
    *OPTIONS, *_ALIASES, *_NEUTRAL, "model", "n", "stream", "stream_options", "echo", "logprobs", "headrace",
    "response_format", "structured_outputs",
}  # fmt: skip
CHAT_FIELDS = frozenset({
    *_FIELDS, "messages", "continue_final_message", "modalities", "top_logprobs", "reasoning_effort",
    "tools", "tool_choice", "parallel_tool_calls",
})  # fmt: skip
"""Fields of a chat completion that are read or have a neutral value."""
COMPLETION_FIELDS = frozenset({*_FIELDS, "prompt", "suffix"})


def read_chat(body: Body, *, strict: bool = False) -> Call:
    """Return the call of a chat completion. strict: see `read_messages`. Raises UsageError that names the field."""
    refuse(body, REFUSED, _NEUTRAL)
    if body.get("modalities") not in (None, [], ["text"]):
        raise UsageError("modalities can only be text")
    messages = read_messages(body.get("messages"), strict=strict)
    continue_text = ""
    if flag(body, "continue_final_message"):
        last = messages.pop()
        if last["role"] != "assistant" or "tool_calls" in last or not messages:
            raise UsageError("continue_final_message needs a last message of the assistant")
        continue_text = str(last["content"])
    more = format_options(body)
    if isinstance(body.get("thinking"), dict):
        more["thinking"] = None  # no option: `_thinking_switch` reads it
    return Call(
        **_shared_fields(body),
        messages=messages,
        continue_text=continue_text,
        options=answer_options(body, _ALIASES, more),
        logprobs=read_logprobs(body.get("logprobs"), body.get("top_logprobs")),
        effort=read(body, "reasoning_effort", OneOf(EFFORTS)),
        budget=_thinking_switch(body),
        **tool_fields(body),
        steps=flag(mapping(body, "headrace"), "steps"),
    )


def read_completion(body: Body) -> Call:
    """Return the call of a completion: texts that are continued. Raises UsageError that names the field."""
    refuse(body, REFUSED - {"best_of"} | {"tools"}, _NEUTRAL)  # "best_of" is looked at next; tools need a conversation
    if body.get("best_of") not in (None, 1, body.get("n", 1)):  # clients send it with the value of `n`
        raise UsageError("best_of is not supported")
    options = answer_options(body, _ALIASES, format_options(body))
    if options.thinking is not None:
        raise UsageError("thinking needs a conversation, not a text to continue")
    call = Call(
        **_shared_fields(body),
        prompts=_prompts(body.get("prompt")),
        suffix=read(body, "suffix", Text()) or None,
        options=options,
        logprobs=read(body, "logprobs", Whole(0, MAX_LOGPROBS)),
    )
    if call.choices > MAX_CHOICES:
        raise UsageError(f"prompt: at most {MAX_CHOICES} answers a request")
    return call


def _shared_fields(body: Body) -> dict[str, Any]:
    """Return the fields of a `Call` that both kinds of bodies have."""
    return {
        "model": read(body, "model", Text()),
        "count": read(body, "n", Whole(1, MAX_CHOICES)) or 1,
        "stream": flag(body, "stream"),
        "include_usage": flag(mapping(body, "stream_options"), "include_usage"),
        "explain": flag(mapping(body, "headrace"), "explain"),
    }


def _prompts(value: object) -> list[str]:
    prompts: list[Any] = value if isinstance(value, list) else [value]
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise UsageError(f"prompt must be a text or a list of texts, not empty, not {shown(value)}")
    return prompts


def _thinking_switch(body: Body) -> bool | None:
    """Return the switch of thinking: DeepSeek's and Anthropic's object, or else vLLM's template variables.

    Both are checked, also where only one counts.
    """
    switch = body.get("thinking")
    variables = mapping(body, "chat_template_kwargs")
    variable = None
    for name in ("enable_thinking", "thinking"):
        if name in variables:
            variable = flag(variables, name)
            break
    if isinstance(switch, dict):
        return read(switch, "type", OneOf(("enabled", "disabled", "auto", "adaptive"))) != "disabled"
    return variable


def chat_choice(
    index: int,
    end: Finished,
    content: str,
    *,
    thinking: str = "",
    calls: Sequence[Mapping[str, object]] = (),
    reports: Sequence[TokenReport] | None = None,
) -> dict[str, object]:
    """Return one choice of a chat completion.

    index: of the choice.
    end: of its answer.
    content: its text without thinking.
    thinking: its thinking, "" without.
    calls: of tools, as `written_call` makes them.
    reports: log probabilities of its tokens; None: they were not asked for.
    """
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": None if reports is None else chat_logprobs(reports),
        "finish_reason": finish_reason(end, calls),
        "seed": end.seed,
    }


def text_choice(
    index: int, end: Finished, text: str, reports: Sequence[TokenReport] | None = None
) -> dict[str, object]:
    """Return one choice of a completion. index, end, reports: see `chat_choice`."""
    return {
        "index": index,
        "text": text,
        "logprobs": None if reports is None else text_logprobs(reports),
        "finish_reason": end.reason,
        "seed": end.seed,
    }


def written_call(identifier: str, name: str, arguments: str, custom: frozenset[str]) -> dict[str, object]:
    """Return a call of a tool as a document.

    identifier: of the call.
    name: of the tool.
    arguments: JSON text.
    custom: names of tools that take one text.
    """
    if name in custom:
        return {"id": identifier, "type": "custom", "custom": {"name": name, "input": custom_input(arguments)}}
    return tool_call(identifier, name, arguments)
