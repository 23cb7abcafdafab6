"""Facts about a chat template, found by rendering short conversations: which messages it shows.

Templates say nowhere which conversations they take. Some refuse two user messages in a row, others drop later system
messages or calls of tools without a word. Each fact is probed once, with words that must come out in their order.
`adapt_messages` rewrites conversations by these facts.

Guard: tests/models/text/test_adapt_messages.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from headrace.models.checkpoint.side_file import without_nulls
from headrace.models.text.chat_template import ChatTemplate, Message
from headrace.runtime.errors import CheckpointError

# Nine letters and digits, which every template takes. `tools.written.IDS` has the same.
_ID = "a1b2c3d4e"
_LONG_ID = "call_0123456789abcdef01234567"  # as clients write them
_NAME = "probe_tool"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "probe"}},
            "required": ["key"],
        },
    },
}

Variables = Mapping[str, Any]


def nested_tools(definitions: Sequence[Mapping[str, object]]) -> Variables:
    """Return the template's variables for tools as OpenAI's API has them."""
    return {"tools": definitions}


def flat_tools(definitions: Sequence[Mapping[str, Any]]) -> Variables:
    """Return the template's variables for tools with their name and parameters at the top: Command R+."""
    return {"tools": [{**definition, **definition["function"]} for definition in definitions]}


def written_tools(definitions: Sequence[Mapping[str, object]]) -> Variables:
    """Return the template's variables for tools as one JSON text, and for the date: Firefunction."""
    functions = [definition["function"] for definition in definitions]
    written = json.dumps(functions, ensure_ascii=False, indent=4)
    return {"functions": written, "datetime": datetime.now().strftime("%Y-%m-%d")}


_OFFERS = (nested_tools, flat_tools, written_tools)


def named_id(name: str, number: int) -> str:
    """Return the identifier of a call that names its tool. number: of the call in the conversation."""
    return f"functions.{name}:{number}"


class TemplateRules:
    """The facts about one template. Each property renders its probes when it is first read."""

    def __init__(self, template: ChatTemplate, *, offers_tools: bool = False) -> None:
        """offers_tools: the facts are of conversations with definitions of tools; some templates differ then."""
        self._template = template
        self.offers_tools = offers_tools

    def accepts(self, variables: Variables) -> bool:
        """Return whether the template renders a conversation with these variables."""
        return self._render([_user("one")], {**self.tool_variables([]), **variables}) is not None

    # --- system messages -------------------------------------------------------------------------------------

    @cached_property
    def takes_system(self) -> bool:
        """True if a system message at the beginning is shown; Gemma 2 refuses it, others drop it."""
        return self._shows(_system("one"), _user("two"))

    @cached_property
    def takes_system_before_answer(self) -> bool:
        """True if a first system message is shown, too, where an answer is the last message."""
        return self._shows(_system("one"), _user("two"), _answer("three"))

    @cached_property
    def takes_system_with_calls(self) -> bool:
        """True if it is shown, too, where a result is the last message.

        Mistral Nemo's template writes it into a last message of the user alone.
        """
        calls = self._calls("three")
        return not self.takes_calls or self._shows(_system("one"), _user("two"), calls, _result("four"))

    @cached_property
    def takes_later_system(self) -> bool:
        """True if system messages are shown wherever they stand, also after each other."""
        return all(
            self._shows(*messages)
            for messages in (
                [_user("one"), _system("two"), _system("three"), _user("four")],
                [_user("one"), _system("two"), _user("three")],
                [_user("one"), _answer("two"), _user("three"), _system("four")],
                [_system("one"), _user("two"), _answer("three"), _system("four"), _user("five")],
            )
        )

    @cached_property
    def takes_system_alone(self) -> bool:
        """True if a conversation needs no user message."""
        return self._shows(_system("one"))

    # --- turns -----------------------------------------------------------------------------------------------

    @cached_property
    def takes_user_pairs(self) -> bool:
        """True if a user message may follow another."""
        return self._shows(_user("one"), _user("two"))

    @cached_property
    def takes_answer_pairs(self) -> bool:
        """True if an assistant's message may follow another."""
        return self._shows(_user("one"), _answer("two"), _answer("three"), _user("four"))

    @cached_property
    def takes_answer_first(self) -> bool:
        """True if a conversation may begin with an assistant's message."""
        return self._shows(_answer("one"), _user("two"))

    @cached_property
    def takes_answer_alone(self) -> bool:
        """True if a conversation may have an assistant's messages alone."""
        return self._shows(_answer("one"))

    @cached_property
    def takes_empty_answer(self) -> bool:
        """True if an assistant's message may be empty."""
        return self._shows(_user("one"), _answer(""), _user("two"))

    # --- tools -----------------------------------------------------------------------------------------------

    def tool_variables(self, definitions: Sequence[Mapping[str, object]]) -> Variables:
        """Return the template's variables that offer tools, or none if `definitions` is empty.

        Definitions get fields that the client leaves out if the template fails without them. Empty for a template that
        writes no tools.
        """
        if not definitions:
            return self._no_tools
        if self._offer is None:
            return {}
        for changed in (sent_definitions, complete_definitions):
            variables = self._offer(changed(definitions))
            if self._render([_user("one")], variables) is not None:
                return variables
        return self._offer(simple_definitions(definitions))

    @property
    def takes_tools(self) -> bool:
        """True if the template writes the definitions of tools."""
        return self._offer is not None

    @cached_property
    def _offer(self) -> Callable[[Sequence[Mapping[str, Any]]], Variables] | None:
        """The way in which the template takes definitions of tools; None if it writes none."""
        for offer in _OFFERS:
            shown = self._render([_user("one")], offer([_TOOL]))
            if shown is not None and _NAME in shown:
                return offer
        return None

    @cached_property
    def _no_tools(self) -> Variables:
        """The template's variables without tools: some templates fail if none is defined."""
        candidates: tuple[Variables, ...] = ({}, {"tools": []}, written_tools([]))
        usable = (variables for variables in candidates if self._render([_user("one")], variables) is not None)
        return next(usable, {})

    @cached_property
    def takes_calls(self) -> bool:
        """True if calls of tools in earlier answers, and their results, are shown."""
        return self.takes_argument_objects or self.takes_argument_texts

    @cached_property
    def takes_argument_objects(self) -> bool:
        """True if the arguments of a call may be an object; False for a template that writes it as Python does."""
        arguments = {"key": _WORDS["two"]}
        text = self._render(self._call_probe(arguments, self.content_of_calls), self._probe_tools) or ""
        is_python = str(arguments) in text and self.takes_argument_texts
        return self._shows_call(arguments, self.content_of_calls) and not is_python

    @cached_property
    def takes_argument_texts(self) -> bool:
        """True if the arguments of a call may be JSON text."""
        return self._shows_call(json.dumps({"key": _WORDS["two"]}), self.content_of_calls)

    @cached_property
    def content_of_calls(self) -> str | None:
        """The content of a message of calls alone: "", or None where a template wants that.

        Some templates show calls only beside None. Others write an empty answer after the calls if the content is "".
        """
        arguments = {"key": _WORDS["two"]}
        lengths: dict[str | None, int] = {}
        for content in ("", None):
            for written in (arguments, json.dumps(arguments)):
                if self._shows_call(written, content):
                    length = len(self._render(self._call_probe(written, content), self._probe_tools) or "")
                    lengths[content] = min(length, lengths.get(content, length))
        return min(lengths, key=lengths.__getitem__, default="")

    def _shows_call(self, arguments: Mapping[str, object] | str, content: str | None) -> bool:
        """Return whether a call with these arguments is shown, in a message with this content."""
        return self._shows(*self._call_probe(arguments, content))

    def _call_probe(self, arguments: Mapping[str, object] | str, content: str | None) -> list[Message]:
        """Return a conversation with one call."""
        call = {**_call("two"), "content": content}
        call["tool_calls"][0]["function"]["arguments"] = arguments
        return [_user("one"), call, _result("three")]

    @cached_property
    def takes_results(self) -> bool:
        """True if results of tools are shown, even where calls are not."""
        call = _answer("two")
        return self.takes_calls or self._shows(_user("one"), call, _result("three"))

    @cached_property
    def takes_parallel_calls(self) -> bool:
        """True if a message may have several calls."""
        return self._shows(_user("one"), self._calls("two", "three"), _result("four"), _result("five", _LATER_ID))

    @cached_property
    def takes_text_with_calls(self) -> bool:
        """True if the text beside a call is shown, each time; DeepSeek R1 shows the first one."""
        return self._shows_texts_with_calls({})

    @cached_property
    def keeps_text_with_calls(self) -> bool:
        """True if the text beside a call is shown, too, where an answer follows; GPT-OSS drops it then."""
        call = {**self._calls("three"), "content": _WORDS["two"]}
        return self._shows(_user("one"), call, _result("four"), _answer("five"), _user("six"))

    @cached_property
    def takes_calls_first(self) -> bool:
        """True if a conversation may begin with calls; Llama 4's template takes a first message for the user's."""
        if self.alternates_without_calls:
            return False
        messages = [self._calls("one"), _result("two")]
        return self._shows(*messages) and self._shows(*messages, _user("three"))

    @cached_property
    def alternates_without_calls(self) -> bool:
        """True if users and answers alternate, where calls and results count as neither: Mistral's templates."""
        if self.takes_user_after_result or not self.takes_calls:
            return False
        return self._shows(_user("one"), _answer("two"), self._calls("three"), _result("four"), _user("five"))

    @cached_property
    def takes_text_and_thinking_with_calls(self) -> bool:
        """True if a message may have text, thinking and a call; GPT-OSS refuses it."""
        return self._shows_texts_with_calls({"reasoning_content": "x", "thinking": "x"})

    def _shows_texts_with_calls(self, thinking: Mapping[str, str]) -> bool:
        """Return whether the text beside a call is shown, in two messages with these fields of thinking."""
        call = {**self._calls("three"), "content": _WORDS["two"], **thinking}
        later = {**self._calls("six"), "content": _WORDS["five"], **thinking}
        return self._shows(_user("one"), call, _result("four"), later, _result("seven"))

    @cached_property
    def takes_user_after_result(self) -> bool:
        """True if a user message may follow the result of a tool."""
        call = self._calls("two") if self.takes_calls else _answer("two")
        return self._shows(_user("one"), call, _result("three"), _user("four"))

    @cached_property
    def takes_any_ids(self) -> bool:
        """True if identifiers of calls may have any form; Mistral's have nine letters and digits, or at least nine."""
        return self._shows_id("x") and self._shows_id(_LONG_ID)

    @cached_property
    def names_calls_by_ids(self) -> bool:
        """True if a call's identifier is written in place of its name: Kimi K2.5's are `functions.NAME:NUMBER`."""
        text = self._render([_user("one"), self._calls("two")], self._no_tools) or ""
        return _ID in text and _NAME not in text

    def _shows_id(self, identifier: str) -> bool:
        """Return whether a call with this identifier is shown."""
        call = self._calls("two")
        call["tool_calls"][0]["id"] = identifier
        return self._shows(_user("one"), call, _result("three", identifier))

    def _calls(self, *words: str) -> dict[str, Any]:
        """Return an assistant's message with a call for each word, with arguments as the template takes them."""
        message = {**_call(*words), "content": self.content_of_calls}
        if not self.takes_argument_objects and self.takes_argument_texts:
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return message

    def written_calls(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str | None:
        """Return the calls of one message as the model would generate them, without thinking and its end of turn.

        None if the template does not show them.
        """
        made: list[dict[str, Any]] = [
            {"id": identifier, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for (name, arguments), identifier in zip(calls, (_ID, _LATER_ID), strict=False)
        ]
        if self.names_calls_by_ids:
            made = [{**call, "id": named_id(call["function"]["name"], number)} for number, call in enumerate(made)]

        # The conversation with this message, and with one of text alone: they differ from the calls on.
        message = {"role": "assistant", "content": self.content_of_calls, "tool_calls": made}
        if not self.takes_argument_objects:
            for call in made:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        variables = self.tool_variables([_TOOL])
        text = self._render([_user("one"), message], variables, add_generation_prompt=False)
        plain = self._render([_user("one"), _answer("two")], variables, add_generation_prompt=False)
        if text is None or plain is None:
            return None
        start = _difference(text, plain)
        end_of_turn = plain.partition(_WORDS["two"])[2]
        return _NO_THINKING.sub("", text[start:].removesuffix(end_of_turn), count=1)

    @cached_property
    def generation_prompt(self) -> str:
        """The text that the template writes before an answer."""
        whole = self._render([_user("one")], self._no_tools) or ""
        without = self._render([_user("one")], self._no_tools, add_generation_prompt=False) or ""
        return whole.removeprefix(without)

    # --- probes ----------------------------------------------------------------------------------------------

    def _shows(self, *messages: Message) -> bool:
        """Return whether the texts and arguments of all messages come out, in their order and apart from each other."""
        text = self._render(messages, self._probe_tools)
        if text is None:
            return False
        end = -1
        for word in (word for message in messages for word in _words_of(message)):
            start = text.find(word, end + 1)
            if start < 0:
                return False
            end = start + len(word)
        return True

    @property
    def _probe_tools(self) -> Variables:
        """The template's variables for tools in a probe."""
        return self.tool_variables([_TOOL] if self.offers_tools else [])

    def _render(
        self, messages: Sequence[Message], variables: Variables, *, add_generation_prompt: bool = True
    ) -> str | None:
        """Return the rendered text, None if the template fails."""
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
            return str.__str__(text)
        except CheckpointError:
            return None


# An empty section of thinking, or its end alone where the prompt has begun it.
_NO_THINKING = re.compile(
    r"\s*(?:(?:<think>|\[THINK\]|<seed:think>|<\|START_THINKING\|>)?\s*"
    r"(?:</think>|\[/THINK\]|</seed:think>|<\|END_THINKING\|>))?\s*"
)
_LATER_ID = "f5g6h7i8j"  # of a second call
# No template looks for these, or changes them.
_WORDS = {name: f"probe{name}" for name in ("one", "two", "three", "four", "five", "six", "seven")}


def _difference(first: str, other: str) -> int:
    """Return the index from which two texts differ, before a tag that both have begun."""
    pairs = enumerate(zip(first, other, strict=False))
    index = next((position for position, (left, right) in pairs if left != right), min(len(first), len(other)))
    for opening, closing in ("<>", "[]"):
        begun = first.rfind(opening, 0, index)
        if begun > first.rfind(closing, 0, index):
            index = begun
    return index


def _system(word: str) -> Message:
    """Return a system message with the text of a word of _WORDS."""
    return {"role": "system", "content": _WORDS[word]}


def _user(word: str) -> Message:
    """Return a user's message. word: see `_system`."""
    return {"role": "user", "content": _WORDS[word]}


def _answer(word: str) -> Message:
    """Return an assistant's message. word: see `_system`; "" for an empty one."""
    return {"role": "assistant", "content": _WORDS.get(word, "")}


def _call(*words: str) -> dict[str, Any]:
    """Return an assistant's message with a call for each word, its only argument."""
    calls = [
        {
            "id": identifier,
            "type": "function",
            "function": {"name": _NAME, "arguments": {"key": _WORDS[word]}},
        }
        for word, identifier in zip(words, (_ID, _LATER_ID), strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(word: str, identifier: str = _ID) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": identifier, "name": _NAME, "content": _WORDS[word]}


def _words_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message that a template has to show: its content, and the arguments of its calls."""
    words: list[str] = []
    if message["content"]:
        words.append(message["content"])
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        words.append(arguments["key"])
    return words


# --- definitions of tools, completed for templates that fail without fields that clients leave out -----------
# The template alone sees the changed definitions; calls are checked against the client's own.

# Fields of a definition that lacks them, and a schema in place of one that allows any value.
_NO_PARAMETERS = {"type": "object", "properties": {}}
_DEFAULTS = {"description": "", "parameters": _NO_PARAMETERS}
_ANY = {"type": "string"}


def sent_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions without null in place of a description or parameters."""
    return [{**definition, "function": without_nulls(definition["function"])} for definition in definitions]


def complete_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions of which each has a description and parameters, at its end if the client sends none."""
    return [
        {**definition, "function": _with_defaults(definition["function"], _DEFAULTS)}
        for definition in sent_definitions(definitions)
    ]


def simple_definitions(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions whose parameters all have a description and one type, for templates that fail otherwise."""
    return [
        {
            **definition,
            "function": {
                **definition["function"],
                "parameters": _with_defaults(_simple(definition["function"]["parameters"]), _NO_PARAMETERS),
            },
        }
        for definition in complete_definitions(definitions)
    ]


def _with_defaults(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return values in their order, then the defaults of missing ones."""
    return dict(values) | {key: value for key, value in defaults.items() if key not in values}


def _simple(schema: Any) -> Any:
    """Return a schema in which each type is one name, and each property is an object with a description.

    Templates that take one type for each value cannot express "any value": such a value becomes a string.
    """
    if isinstance(schema, list):
        return [_simple(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    simple = {key: _simple(value) for key, value in schema.items()}
    if "type" in simple:
        if isinstance(simple["type"], list):
            kinds = simple["type"]
        else:
            kinds = [simple["type"]]
        # Hermes 2 Pro's template reads "null" as a list of types, letter by letter, and each letter again, without end.
        simple["type"] = next((kind for kind in kinds if kind != "null"), "string")
    if simple.get("type") == "array" and not isinstance(simple.get("items"), dict):
        simple["items"] = _ANY
    if simple.get("type") == "object" and simple.get("additionalProperties", True) is True:
        simple["additionalProperties"] = _ANY
    properties = simple.get("properties")
    if isinstance(properties, dict):
        simple["properties"] = {
            name: _with_defaults(each if isinstance(each, dict) else {}, {**_ANY, "description": ""})
            for name, each in properties.items()
            if each is not False  # no value fits
        }
    return simple
