"""Conversations rewritten for a chat template that would drop or refuse parts of them.

Clients send all that OpenAI's and Anthropic's APIs allow; each template takes a part of it (`TemplateRules`). No text
is left out: a text without a place in the template moves to the nearest message that the template shows.

`ChatPrompt` calls `adapt_messages` before it renders. tests/models/text/test_adapt_messages.py looks for every text of
generated conversations in the prompts of templates that differ in one rule each.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.models.checkpoint.side_file import check_parts, is_deep
from headrace.models.text.chat_template import Message, check_roles
from headrace.models.text.template_rules import TemplateRules, named_id
from headrace.models.text.template_text import TemplateText
from headrace.models.text.tools.call import write_json_calls
from headrace.runtime.errors import UsageError

_NO_RESULT = "(no result)"
_NOTHING_SAID = "..."  # the user's part before an answer that has none before it
_MOST_VALUES = 1 << 18  # in the arguments of a call
_MAX_LEVELS = 100  # of objects and lists in them
_TOO_DEEP = f"the arguments of a call are nested more than {_MAX_LEVELS} levels deep"
_PARAGRAPH = TemplateText("\n\n")  # keeps the origin of the texts that it joins

CallsWriter = Callable[[Sequence[Mapping[str, object]]], str]
"""Writes calls {"name": ..., "arguments": {...}} in the model's own form."""


def adapt_messages(
    messages: Sequence[Message], rules: TemplateRules, write_calls: CallsWriter = write_json_calls
) -> list[Message]:
    """Return a conversation that the template shows wholly, with calls and results in their order.

    messages: arguments of their calls are objects (`with_argument_objects`), and become texts for a template that wants
    those. write_calls: for templates that show no calls. Raises UsageError for a message without a known role, or with
    content that is no text.
    """
    check_roles(messages)
    adapted = _join_first_systems(messages)
    if any(message.get("tool_calls") or message["role"] == "tool" for message in adapted):
        adapted = _adapt_calls(_pair_results(adapted), rules, write_calls)
    adapted = _place_systems(adapted, rules)
    return _adapt_turns(adapted, rules)


# --- calls and results ---------------------------------------------------------------------------------------


def with_argument_objects(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as objects."""
    return [with_calls(message, _with_object) for message in messages]


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """Return the calls of a message, after `with_argument_objects`."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def with_calls(message: Message, change: Callable[[Mapping[str, Any]], Mapping[str, object]]) -> Message:
    """Return a message with each of its calls changed."""
    calls = calls_of(message)
    if not calls:
        return message
    return {**message, "tool_calls": [change(call) for call in calls]}


def _with_object(call: Mapping[str, object]) -> dict[str, object]:
    """Return a call with its arguments as an object; one in another form gets OpenAI's."""
    function = call.get("function")
    inner: Mapping[str, object] = call
    if isinstance(function, Mapping):
        inner = function
    changed = {**inner, "arguments": object_of(inner.get("arguments"))}
    return {**call, "type": "function", "function": changed}


def object_of(arguments: object) -> dict[str, object]:
    """Return arguments as an object. Text that is none, such as one that was cut, becomes its only field.

    Raises UsageError for a text of very many values, or of very deep ones.
    """
    if isinstance(arguments, Mapping):
        return dict(arguments)
    text = "" if arguments is None else str(arguments)
    if not text.strip():
        return {}
    try:
        check_parts(text.encode("utf-8", "surrogatepass"), _MOST_VALUES)
    except ValueError:
        raise UsageError(f"the arguments of a call have more than {_MOST_VALUES} values") from None
    try:
        value = json.loads(text)
    except RecursionError:
        raise UsageError(_TOO_DEEP) from None
    except ValueError:
        value = None
    if isinstance(value, dict) and is_deep(value, _MAX_LEVELS):
        raise UsageError(_TOO_DEEP)
    return value if isinstance(value, dict) else {"arguments": text}


def _pair_results(messages: list[Message]) -> list[Message]:
    """Return messages in which each call is followed by its result.

    A call without a result gets one that says so, unless the conversation ends with it. A result without a call becomes
    text of the user.
    """
    # Results by the call that they answer, in their order.
    messages = _with_result_ids(messages)
    asked = {call.get("id") for message in messages for call in calls_of(message)}
    results: dict[object, list[Message]] = {}
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in asked:
            results.setdefault(message.get("tool_call_id"), []).append(message)

    paired: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in asked:
                paired.append(_result_as_user(message))
            continue
        paired.append(message)
        is_last = index == len(messages) - 1
        for call in calls_of(message):
            known = results.get(call.get("id"))
            if known:
                paired.append({**known.pop(0), "name": call["function"].get("name")})
            elif not is_last:
                paired.append(_missing_result(call))
    return paired


def _with_result_ids(messages: list[Message]) -> list[Message]:
    """Return messages in which a result without an identifier answers the next call that is open."""
    open_calls: list[object] = []
    changed: list[Message] = []
    for message in messages:
        open_calls += [call.get("id") for call in calls_of(message)]
        if message["role"] == "tool" and open_calls:
            identifier = message.get("tool_call_id") or open_calls[0]
            if identifier in open_calls:
                open_calls.remove(identifier)
            message = {**message, "tool_call_id": identifier}
        changed.append(message)
    return changed


def _missing_result(call: Mapping[str, Any]) -> Message:
    """Return a result for a call that has none."""
    name = call["function"].get("name")
    return {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": _NO_RESULT}


def _result_as_user(message: Message) -> Message:
    """Return a result as a message of the user."""
    name = message.get("name") or message.get("tool_call_id") or "the function"
    return {"role": "user", "content": f"Result of {name}:\n{text_of(message)}"}


def _adapt_calls(messages: list[Message], rules: TemplateRules, write_calls: CallsWriter) -> list[Message]:
    """Return messages with calls, and their results, as the template shows them. See `adapt_messages`."""
    if not rules.takes_calls:
        messages = [_with_written_calls(message, write_calls) for message in messages]
        if not rules.takes_results or not rules.takes_tools:
            messages = [_result_as_user(message) if message["role"] == "tool" else message for message in messages]
        return messages
    if rules.names_calls_by_ids:
        messages = _with_ids(messages, lambda call, number: named_id(str(call["function"].get("name")), number))
    elif not rules.takes_any_ids:
        messages = _with_ids(messages, lambda call, _: short_id(call.get("id")))
    messages = [_with_content_of_calls(message, rules) for message in _split_calls(messages, rules)]
    if not rules.takes_argument_objects:
        messages = [with_calls(message, _with_text) for message in messages]
    return messages


def _with_written_calls(message: Message, write_calls: CallsWriter) -> Message:
    """Return a message with its calls as a part of its text."""
    calls = calls_of(message)
    if not calls:
        return message
    written = write_calls([call["function"] for call in calls])
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    answer = text_of(message)
    return {**others, "content": answer + "\n" + written if answer else written}


def _with_ids(messages: list[Message], rename: Callable[[Mapping[str, Any], int], str]) -> list[Message]:
    """Return messages with other identifiers of calls, and of the results that answer them.

    rename: returns the identifier of a call, by its number in the conversation.
    """
    identifiers: dict[object, str] = {}  # of the calls so far, by those they had
    numbers = itertools.count()

    def renamed(call: Mapping[str, Any]) -> dict[str, object]:
        identifier = rename(call, next(numbers))
        identifiers[call.get("id")] = identifier
        return {**call, "id": identifier}

    changed: list[Message] = []
    for message in messages:
        message = with_calls(message, renamed)
        if message["role"] == "tool":
            asked = message.get("tool_call_id")
            message = {**message, "tool_call_id": identifiers.get(asked, asked)}
        changed.append(message)
    return changed


def short_id(identifier: object) -> str:
    """Return an identifier of nine letters and digits for a call."""
    text = str(identifier)
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _split_calls(messages: list[Message], rules: TemplateRules) -> list[Message]:
    """Return messages of which none has more than the template shows: one call, or calls without text."""
    split: list[Message] = []
    # A template may drop the text beside calls before an answer; `keeps_text_with_calls`.
    last_answer = max((index for index, message in enumerate(messages) if _has_answer(message, rules)), default=-1)
    index = 0
    while index < len(messages):
        message = messages[index]
        takes_text = _takes_text(message, rules) and (rules.keeps_text_with_calls or index > last_answer)
        calls = calls_of(message)
        # Its results follow it, as `_pair_results` has put them.
        following = messages[index + 1 : index + 1 + len(calls)]
        results = [each for each in following if each["role"] == "tool"]
        index += 1
        if not calls:
            split.append(message)
            continue
        index += len(results)
        if text_of(message) and not takes_text:
            split.append({"role": message["role"], "content": text_of(message)})
            message = {**message, "content": ""}
        if len(calls) == 1 or rules.takes_parallel_calls:
            split += [message, *results]
            continue
        for number, call in enumerate(calls):
            if number == 0:
                first = message
            else:
                first = {"role": message["role"], "content": ""}
            split += [{**first, "tool_calls": [call]}, *results[number : number + 1]]
    return split


def _takes_text(message: Message, rules: TemplateRules) -> bool:
    """Return whether the template shows the text beside the calls of a message."""
    has_thinking = bool(message.get("reasoning_content") or message.get("thinking"))
    if has_thinking:
        return rules.takes_text_and_thinking_with_calls
    return rules.takes_text_with_calls


def _has_answer(message: Message, rules: TemplateRules) -> bool:
    """Return whether a message is an answer without calls, or has a text that becomes one."""
    is_answer = message["role"] == "assistant"
    return is_answer and (not calls_of(message) or (text_of(message) != "" and not _takes_text(message, rules)))


def _with_content_of_calls(message: Message, rules: TemplateRules) -> Message:
    """Return a message of calls alone with the content that the template wants there."""
    is_alone = bool(message.get("tool_calls")) and not text_of(message)
    if is_alone:
        return {**message, "content": rules.content_of_calls}
    return message


def _with_text(call: Mapping[str, Any]) -> dict[str, object]:
    """Return a call with its arguments as JSON text."""
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


# --- system messages -----------------------------------------------------------------------------------------


def _join_first_systems(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the system messages at their beginning as one: most templates take only one."""
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    joined = _PARAGRAPH.join(text_of(message) for message in messages[:first])
    return [{"role": "system", "content": joined}, *messages[first:]]


def _place_systems(messages: list[Message], rules: TemplateRules) -> list[Message]:
    """Return messages whose system messages stand where the template shows them.

    Others become text of the next user message, or a user message of their own if an answer or nothing follows.
    """
    systems = [index for index, message in enumerate(messages) if message["role"] == "system"]
    moved = {index for index in systems if index > 0 and not rules.takes_later_system}
    if 0 in systems and not _takes_first(messages, rules):
        moved.add(0)
    placed: list[Message] = []
    waiting: list[str] = []  # system messages that are to be moved
    for index, message in enumerate(messages):
        if index in moved:
            waiting.append(text_of(message))
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": _PARAGRAPH.join([*waiting, text_of(message)])}
            waiting = []
        elif waiting and message["role"] != "tool":
            placed.append({"role": "user", "content": _PARAGRAPH.join(waiting)})
            waiting = []
        placed.append(message)
    if waiting:
        placed.append({"role": "user", "content": _PARAGRAPH.join(waiting)})
    return placed


def _takes_first(messages: Sequence[Message], rules: TemplateRules) -> bool:
    """Return whether the template shows a system message at the beginning of this conversation."""
    if not any(message["role"] == "user" for message in messages):
        return rules.takes_system and rules.takes_system_alone
    # With tools it has one place in all turns, so that the beginning of the prompt stays the same.
    has_calls = rules.offers_tools or any(message["role"] == "tool" for message in messages)
    if has_calls and not rules.takes_system_with_calls:
        return False
    return rules.takes_system and (messages[-1]["role"] != "assistant" or rules.takes_system_before_answer)


# --- turns ---------------------------------------------------------------------------------------------------


def _adapt_turns(messages: list[Message], rules: TemplateRules) -> list[Message]:
    """Return messages in turns that the template takes: neighbours of one role joined, an answer never first."""
    adapted: list[Message] = []
    has_user = any(message["role"] == "user" for message in messages)
    takes_answer_first = rules.takes_answer_alone
    if has_user:
        takes_answer_first = rules.takes_answer_first
    for message in messages:
        last = adapted[-1] if adapted else None
        has_calls = bool(message.get("tool_calls"))
        is_empty = message["role"] == "assistant" and not text_of(message) and not has_calls
        if is_empty and not rules.takes_empty_answer:
            continue
        if last is not None and _must_join(last, message, rules, _speaker(adapted)):
            texts = [text for text in (text_of(last), text_of(message)) if text]
            adapted[-1] = {**last, **_joined_fields(last, message), "content": _PARAGRAPH.join(texts)}
            continue
        if message["role"] == "assistant":
            takes_first = takes_answer_first
            if has_calls:
                takes_first = rules.takes_calls_first
            answers_itself = rules.alternates_without_calls and not has_calls and _speaker(adapted) == "assistant"
            if answers_itself or (_begins(adapted) and not takes_first):
                adapted.append({"role": "user", "content": _NOTHING_SAID})
        adapted.append(message)
    return adapted or [{"role": "user", "content": _NOTHING_SAID}]


def _speaker(messages: Sequence[Message]) -> str:
    """Return the role of the last message that is no call, result or system message; "" without any."""
    spoken = (message["role"] for message in reversed(messages) if not message.get("tool_calls"))
    return next((role for role in spoken if role in ("user", "assistant")), "")


def _begins(messages: Sequence[Message]) -> bool:
    """Return whether there is nothing but system messages yet."""
    return all(message["role"] == "system" for message in messages)


def _must_join(last: Message, message: Message, rules: TemplateRules, speaker: str) -> bool:
    """Return whether a message has to be a part of the last one. speaker: see `_speaker`."""
    roles = (last["role"], message["role"])
    if roles == ("user", "user"):
        return not rules.takes_user_pairs
    if roles == ("tool", "user"):
        is_next = rules.alternates_without_calls and speaker == "assistant"
        return not rules.takes_user_after_result and not is_next
    if roles == ("assistant", "assistant") and not last.get("tool_calls"):
        return not rules.takes_answer_pairs and (not message.get("tool_calls") or rules.takes_text_with_calls)
    return False


def _joined_fields(last: Message, message: Message) -> dict[str, object]:
    """Return the fields that a message gets from the next one, which joins it: calls, and the thinking of both."""
    fields: dict[str, object] = {}
    if message.get("tool_calls"):
        fields["tool_calls"] = message["tool_calls"]
    for key in ("reasoning_content", "thinking"):
        texts = [str(each[key]) for each in (last, message) if each.get(key)]
        if texts:
            fields[key] = _PARAGRAPH.join(texts)
    return fields


def text_of(message: Message) -> str:
    """Return the text of a message, the texts of its parts joined. Raises UsageError for any other content."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = [None]
    if isinstance(content, Sequence):
        parts = [part.get("text", "") for part in content if isinstance(part, Mapping)]
    if not all(isinstance(part, str) for part in parts):
        raise UsageError("the content of a message is neither a text nor a list of parts with texts")
    return "".join(parts)
