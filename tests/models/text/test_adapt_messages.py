"""Nothing of a conversation is lost or refused, whatever a template drops or refuses."""

import itertools
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.text.adapt_messages import adapt_messages, short_id, with_argument_objects
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.template_rules import TemplateRules
from headrace.runtime.errors import UsageError
from tests.support.families import FAMILIES

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

# A template that takes everything, and changes of it that each drop or refuse one thing.
_TURNS = """\
{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{%- for message in messages %}
{{- '\\n<' + message.role + '>' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '[' ~ call.id ~ ' ' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ ']' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n<assistant>' }}{% endif %}"""


def _refuse(condition: str, says: str = "no") -> str:
    """Return a template that refuses conversations with a message under a condition."""
    check = "{% for message in messages %}{% if " + condition + " %}{{ raise_exception('" + says + "') }}{% endif %}"
    return check + "{% endfor %}" + _TURNS


def _drop(condition: str) -> str:
    """Return a template that leaves out messages under a condition."""
    return _TURNS.replace("for message in messages", f"for message in messages if not ({condition})")


_ALTERNATION = """\
{%- set turns = namespace(number=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (turns.number % 2 == 0) -%}{{ raise_exception('alternate') }}{%- endif -%}
{%- set turns.number = turns.number + 1 -%}
{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {
    "all": _TURNS,
    "no system": _refuse("message.role == 'system'"),
    "system dropped": _drop("message.role == 'system'"),
    "later system refused": _refuse("message.role == 'system' and not loop.first"),
    "later system dropped": _TURNS.replace(
        "{{- '\\n<' + message.role",
        "{%- if message.role == 'system' and not loop.first %}{% continue %}{% endif %}{{- '\\n<' + message.role",
    ),
    "a user is needed": "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('user') }}{% endif %}" + _TURNS,
    "alternation": _ALTERNATION + _TURNS,
    "answers run together": _TURNS.replace(
        "{{- '\\n<' + message.role + '>' }}",
        "{%- if loop.first or message.role != 'assistant' or loop.previtem.role != 'assistant' %}"
        "{{- '\\n<' + message.role + '>' }}{% endif %}",
    ),
    "no empty answer": _refuse("message.role == 'assistant' and not message.content and not message.tool_calls"),
    "one call": _refuse("message.tool_calls and message.tool_calls | length > 1"),
    "first call shown": _TURNS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
    "text or calls": _TURNS.replace("if message.content", "if message.content and not message.tool_calls"),
    "thinking or text": _refuse("message.tool_calls and message.content and message.reasoning_content"),
    "no calls": _TURNS.replace("message.tool_calls or []", "[]"),
    "no calls, no results": _drop("message.role == 'tool'").replace("message.tool_calls or []", "[]"),
    "no tools at all": _refuse("message.role == 'tool' or message.tool_calls").replace("tools or []", "[]"),
    "ids of nine": _refuse("message.tool_calls and message.tool_calls[0].id | length != 9"),
    "ids of nine or more": _refuse("message.tool_calls and message.tool_calls[0].id | length < 9"),
    "calls named by ids": _TURNS.replace("call.id ~ ' ' ~ call.function.name", "call.id"),
    "system before a last user message": "{%- set last = messages | last -%}"
    + _drop("message.role == 'system' and last.role != 'user'"),
    "text with the first calls alone": "{%- set seen = namespace(calls=false) -%}"
    + _TURNS.replace(
        "if message.content %}", "if message.content and not (message.tool_calls and seen.calls) %}"
    ).replace("{%- for call in", "{%- if message.tool_calls %}{% set seen.calls = true %}{% endif %}{%- for call in"),
    "text with calls until an answer": _TURNS.replace(
        "{%- if message.content %}",
        "{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}"
        "{%- if message.content and not (message.tool_calls and later | rejectattr('tool_calls') | list) %}"
        "{%- if message.tool_calls and message.reasoning_content %}{{ raise_exception('both') }}{% endif %}",
    ),
    "a first message without calls": _TURNS.replace(
        "message.tool_calls or []", "((message.tool_calls or []) if message != messages[0] else [])"
    ),
    "contents in parts": _TURNS.replace("{{ message.content }}", "{{ message.content[0]['text'] }}"),
    "arguments as text": _TURNS.replace("(call.function.arguments | tojson)", "('' + call.function.arguments)"),
    "arguments as object": _TURNS.replace(
        "(call.function.arguments | tojson)", "(call.function.arguments.items() | list)"
    ),
    "result after call": _refuse("message.role == 'tool' and loop.previtem.role not in ['assistant', 'tool']"),
    "flat tools": _TURNS.replace("tool.function.name", "tool.description ~ tool.name"),
    "tools as text": "{{ functions }}" + _TURNS.replace("tools or []", "[]"),
    "list of tools needed": "{{ tools | length }}" + _TURNS,
}


def _call(identifier: str | None, number: int, arguments: Any = None) -> dict[str, Any]:
    """Return a call of `look`. number: in its arguments, unless others are given."""
    if arguments is None:
        arguments = {"at": f"argument{number}"}
    return {"id": identifier, "type": "function", "function": {"name": "look", "arguments": arguments}}


@cache  # rules are found by rendering probes
def _rules(template: str, tools: bool) -> tuple[ChatTemplate, TemplateRules]:
    chat_template = ChatTemplate({"default": template})
    return chat_template, TemplateRules(chat_template, offers_tools=tools)


def _render(template: str, messages: list[dict[str, Any]], *, tools: bool = True) -> str:
    chat_template, rules = _rules(template, tools)
    adapted = adapt_messages(with_argument_objects(messages), rules)
    return chat_template.render(adapted, **rules.tool_variables(_TOOLS if tools else []))


def _in_order(text: str, words: list[str]) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a conversation as a client could send it, and its texts in the order in which they have to come."""
    numbers = itertools.count(1)
    messages: list[dict[str, Any]] = []
    words: list[str] = []

    def text(kind: str) -> str:
        words.append(f"{kind}{next(numbers):03}x")
        return words[-1]

    kinds = ["system", "developer", "user", "answer", "empty answer", "calls", "lost call", "orphan"]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7)):
        if kind in ("system", "developer", "user"):
            messages.append({"role": kind, "content": text(kind)})
        elif kind == "answer":
            messages.append({"role": "assistant", "content": text(kind)})
        elif kind == "empty answer":
            messages.append({"role": "assistant", "content": ""})
        elif kind == "orphan":
            messages.append({"role": "tool", "tool_call_id": "unknown", "content": text("orphan")})
        else:
            message: dict[str, Any] = {"role": "assistant", "content": draw(st.sampled_from([None, ""]))}
            if draw(st.booleans()):
                message["content"] = text("said")
            if draw(st.booleans()):
                message["reasoning_content"] = "thought"
            identifiers = [f"call_{next(numbers)}_{'0' * 20}" for _ in range(draw(st.integers(1, 3)))]
            arguments = [text("argument") for _ in identifiers]
            form = draw(st.sampled_from([dict, json.dumps]))
            message["tool_calls"] = [
                _call(identifier, 0, form({"at": argument}))
                for identifier, argument in zip(identifiers, arguments, strict=True)
            ]
            messages.append(message)
            if kind == "calls":
                results = [
                    {"role": "tool", "tool_call_id": identifier, "name": "look", "content": text("result")}
                    for identifier in identifiers
                ]
                messages += draw(st.permutations(results))
    return messages, words


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(conversation=conversations(), tools=st.booleans())
def test_no_template_loses_or_refuses_a_text(
    name: str, conversation: tuple[list[dict[str, Any]], list[str]], tools: bool
) -> None:
    messages, words = conversation
    before = json.dumps(messages)
    text = _render(TEMPLATES[name], messages, tools=tools)
    assert [word for word in words if text.count(word) != 1] == []
    assert json.dumps(messages) == before


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_come_in_their_order(name: str) -> None:
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "three", "tool_calls": [_call("call_a", 4), _call("call_b", 5)]},
        {"role": "tool", "tool_call_id": "call_b", "content": "seven"},
        {"role": "tool", "tool_call_id": "call_a", "content": "six"},
        {"role": "user", "content": "eight"},
        {"role": "assistant", "content": "nine"},
        {"role": "system", "content": "ten"},
        {"role": "user", "content": "eleven"},
    ]
    text = _render(TEMPLATES[name], messages)
    assert _in_order(text, ["one", "two", "three", "argument4", "argument5", "eight", "nine", "ten", "eleven"])
    assert _in_order(text, ["argument4", "six", "seven", "eight"])


def test_a_template_that_takes_everything_gets_it_unchanged() -> None:
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four", "tool_calls": [_call("call_a", 1), _call("call_b", 2)]},
        {"role": "tool", "tool_call_id": "call_a", "name": "look", "content": "five"},
        {"role": "tool", "tool_call_id": "call_b", "name": "look", "content": "six"},
        {"role": "system", "content": "seven"},
        {"role": "assistant", "content": "eight"},
    ]
    rules = TemplateRules(ChatTemplate({"default": _TURNS}), offers_tools=True)
    assert adapt_messages(messages, rules) == messages


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        (None, "{}"),
        ("{}", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        ('{"city": "Par', '{"arguments": "{\\"city\\": \\"Par"}'),
        ("[1]", '{"arguments": "[1]"}'),
    ],
)
def test_arguments_of_any_form_reach_the_template_as_an_object(arguments: Any, shown: str) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert f"[a look {shown}]" in _render(_TURNS, messages)


def test_ids_name_the_tools_where_a_template_writes_them_instead() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 1), _call("b", 2)]},
        {"role": "tool", "tool_call_id": "b", "content": "y"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 3)]},
        {"role": "tool", "tool_call_id": "a", "content": "z"},
    ]
    template = TEMPLATES["calls named by ids"].replace(
        "message.role + '>'", "message.role + (message.tool_call_id or '')"
    )
    places = (
        "functions.look:0 ",
        "functions.look:1 ",
        "toolfunctions.look:1",
        "functions.look:2 ",
        "toolfunctions.look:2",
    )
    assert _in_order(_render(template, messages), list(places))


def test_arguments_are_texts_where_a_template_would_write_them_as_python() -> None:
    template = _TURNS.replace("(call.function.arguments | tojson)", "call.function.arguments")
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 1, {"at": "it's", "deep": True})]},
    ]
    assert '[a look {"at": "it\'s", "deep": true}]' in _render(template, messages)


def test_neighbouring_system_messages_never_run_into_each_other() -> None:
    """DeepSeek Coder's template writes them without an end."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "x"},
        {"role": "system", "content": "first"},
        {"role": "system", "content": "second"},
        {"role": "user", "content": "y"},
    ]
    assert "<user>first\n\nsecond\n\ny" in _render(template, messages)


def test_a_text_leaves_its_call_only_where_a_later_answer_would_drop_it() -> None:
    """GPT-OSS's template writes such a text as analysis, up to the answer."""
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [_call("a", 1)]},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "y"},
    ]
    template = TEMPLATES["text with calls until an answer"]
    assert "<assistant>Let me see.[a look" in _render(template, messages)
    answered = _render(template, [*messages, {"role": "assistant", "content": "z"}, {"role": "user", "content": "w"}])
    assert "<assistant>Let me see.\n<assistant>[a look" in answered


def test_answers_that_become_one_keep_the_thinking_of_both() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "a", "reasoning_content": "first", "thinking": "first"},
        {"role": "assistant", "content": "b", "reasoning_content": "second"},
        {"role": "assistant", "content": "c"},
    ]
    rules = TemplateRules(ChatTemplate({"default": TEMPLATES["alternation"]}))
    thoughts = {"reasoning_content": "first\n\nsecond", "thinking": "first"}
    assert adapt_messages(messages, rules)[1:] == [{"role": "assistant", "content": "a\n\nb\n\nc", **thoughts}]


def test_a_call_without_a_result_gets_a_placeholder() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 1)]},
        {"role": "user", "content": "y"},
    ]
    assert "\n<tool>(no result)\n<user>y" in _render(_TURNS, messages)
    assert "no result" not in _render(_TURNS, messages[:2])


def test_a_result_without_an_identifier_answers_the_open_call() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 1), _call("b", 2)]},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second"},
    ]
    assert _render(_TURNS, messages).endswith("\n<tool>first\n<tool>second\n<assistant>")


def test_short_ids_are_the_same_in_every_turn_and_differ_from_each_other() -> None:
    assert short_id("abcdefghi") == "abcdefghi"
    assert short_id("call_1") == short_id("call_1") != short_id("call_2")
    assert len(short_id("call_1")) == 9
    assert short_id(None).isalnum()


def test_a_user_text_after_a_result_joins_it_where_turns_alternate() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_call("a", 1)]},
        {"role": "tool", "tool_call_id": "a", "content": "result"},
        {"role": "user", "content": "and now"},
    ]
    assert "<tool>result\n\nand now\n" in _render(TEMPLATES["alternation"], messages)
    assert "<tool>result\n<user>and now\n" in _render(_TURNS, messages)


def test_calls_that_a_template_drops_are_written_in_the_answer() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [_call("a", 1)]},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "sunny"},
    ]
    written = '<assistant>Let me see.\n{"name": "look", "arguments": {"at": "argument1"}}\n'
    assert written + "<tool>sunny" in _render(TEMPLATES["no calls"], messages)
    later = [*messages, {"role": "user", "content": "next"}]
    assert written + "<tool>sunny\n<user>next" in _render(TEMPLATES["no calls"], later)
    assert written + "<user>Result of look:\nsunny" in _render(TEMPLATES["no calls, no results"], messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_message_is_never_lost(family: str) -> None:
    template = ChatTemplate({"default": FAMILIES[family].template}, {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompt = template.render(adapt_messages(messages, TemplateRules(template)))
    assert prompt.count("be brief") == prompt.count("hi") == 1
    assert prompt.index("be brief") < prompt.index("hi")
    assert ("be brief\n\nhi" in prompt) == (not FAMILIES[family].places_system or family == "gemma3")


def test_a_system_message_without_a_user_becomes_one() -> None:
    template = ChatTemplate({"default": FAMILIES["gemma2"].template}, {"bos_token": "<bos>"})
    messages = adapt_messages([{"role": "system", "content": "be brief"}], TemplateRules(template))
    assert "<start_of_turn>user\nbe brief<end_of_turn>" in template.render(messages)


@pytest.mark.parametrize("content", [False, 3, {"text": "x"}, [{"text": 3}], [{"text": None}]])
def test_a_system_message_that_is_no_text_is_refused(content: Any) -> None:
    rules = TemplateRules(ChatTemplate({"default": TEMPLATES["system dropped"]}))
    with pytest.raises(UsageError, match="content"):
        adapt_messages([{"role": "system", "content": content}, {"role": "user", "content": "x"}], rules)


@pytest.mark.parametrize(
    "function",
    [
        {"name": "look"},
        {"name": "look", "description": None, "parameters": None},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": True}}},
        {"name": "look", "parameters": {}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "null"}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": False, "b": {"type": "string"}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "array", "items": True}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "object"}}}},
    ],
)
def test_definitions_get_the_fields_that_a_template_reads(function: dict[str, Any]) -> None:
    """As Command R+ does: fields of the tool and of each parameter are joined as texts. Hermes 2 Pro fails for null,
    GigaChat for boolean schemas.
    """
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name + ': ' + tool.function.description }}"
        "{% for name, each in tool.function.parameters.properties.items() %}"
        "{% if each is boolean %}{{ raise_exception('boolean') }}{% endif %}"
        "{% if each.type == 'array' %}{{ '' + each['items'].type }}{% endif %}"
        "{% if each.type == 'object' %}{{ '' + each.additionalProperties.type }}{% endif %}"
        "{% if each.type == 'null' %}{{ raise_exception('null') }}{% endif %}"
        "{{ ' ' + name + ' ' + each.type + ' ' + each.description }}{% endfor %}{% endfor %}" + _TURNS
    )
    rules = TemplateRules(ChatTemplate({"default": template}), offers_tools=True)
    variables = rules.tool_variables([{"type": "function", "function": function}])
    text = ChatTemplate({"default": template}).render([{"role": "user", "content": "hi"}], **variables)
    assert text.startswith("look: ")


@pytest.mark.parametrize(
    "arguments", ['{"a": [' + "[]," * (1 << 18) + "[]]}", '{"a": ' * 101 + "1" + "}" * 101, '{"a": ' * 9999]
)
def test_arguments_that_take_gigabytes_or_are_very_deep_are_refused(arguments: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [_call("a", 1, arguments)]}]
    with pytest.raises(UsageError, match="arguments of a call"):
        with_argument_objects(messages)


def test_arguments_with_long_texts_are_taken() -> None:
    arguments = json.dumps({"a": "[,]" * (1 << 18)})
    [message] = with_argument_objects([{"role": "assistant", "tool_calls": [_call("a", 1, arguments)]}])
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(arguments)
