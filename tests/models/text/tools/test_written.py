"""Forms of tool calls learned from a template: it writes calls, and they are read back, in pieces of any size."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import ToolCall
from headrace.models.text.tools.form import MarkupTokens
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import form_of
from headrace.models.text.tools.use import ToolUse
from headrace.models.text.tools.written import Markup, Written, learn
from tests.support.tiny_chat import write_byte_tokenizer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "time2", "parameters": {"type": "object", "properties": {}}}}
USE = ToolUse([LOOK, CLOCK])


def template(calls: str) -> str:
    """Return a template that writes calls in this way, each with `call.function` and `args`."""
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        "{% if message.tool_calls %}" + calls + "{% endif %}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


_EACH = "{% for call in message.tool_calls %}"
TEMPLATES = {
    "numbered sections": "<|calls|>"
    + _EACH
    + "<|call|>functions.{{ call.function.name }}:{{ loop.index0 }}<|arguments|>"
    "{{ call.function.arguments | tojson }}<|end call|>{% endfor %}<|end calls|>",
    "list of objects": "<actions>[" + _EACH + '{"tool": "{{ call.function.name }}", "with": '
    "{{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]</actions>",
    "name as key": "<|tools|>[" + _EACH + '{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|/tools|>",
    "lines in tags": "<calls>\n" + _EACH + '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n{% endfor %}</calls>",
    "identifiers": _EACH + "<|call|>{{ call.id }}<|name|>{{ call.function.name }}<|args|>"
    "{{ call.function.arguments | tojson }}<|end|>{% endfor %}",
    "identifiers with names": _EACH + "<|call|>{{ call.id }}<|args|>{{ call.function.arguments | tojson }}<|end|>"
    "{% endfor %}",
    "tagged": "<group>\n"
    + _EACH
    + '<invoke name="{{ call.function.name }}">\n{% for key, value in call.function.arguments.items() %}'
    '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</group>",
    "tagged, one a group": _EACH + "<seed:call><function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>"
    "{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function></seed:call>{% endfor %}",
    "tagged, special characters in CDATA": _EACH + '<function name="{{ call.function.name }}">'
    "{% for key, value in call.function.arguments.items() %}"
    "{% set special = value is string and ('<' in value or '\\n' in value) %}"
    '<param name="{{ key }}">{% if special %}<![CDATA[{{ value }}]]>'
    "{% else %}{{ value }}{% endif %}</param>{% endfor %}</function>{% endfor %}",
    "one call": "<|function|>"
    + _EACH
    + "{% if loop.first %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endif %}{% endfor %}",
}
Calls = list[tuple[str, dict[str, Any]]]


def rules_of(name: str) -> TemplateRules:
    """Return the rules of a template of TEMPLATES."""
    return TemplateRules(ChatTemplate({"default": template(TEMPLATES[name])}), offers_tools=True)


def form(name: str) -> Written:
    """Return the form that is learned from a template of TEMPLATES, without control tokens."""
    markup = learn(rules_of(name).written_calls)
    assert isinstance(markup, Markup)
    return Written(MarkupTokens([], lambda _: None, frozenset()), USE.tools, markup)


FORMS = {name: form(name) for name in TEMPLATES}
RULES = {name: rules_of(name) for name in TEMPLATES}


def read(name: str, text: str, size: int) -> tuple[str, Calls]:
    """Return the text around the calls, and the calls. size: characters of a piece."""
    stream = ToolStream(FORMS[name], MarkupTokens([], lambda _: None, frozenset()))
    released = ""
    calls = list[ToolCall]()
    for start in range(0, len(text), size):
        more, found = stream.feed(text[start : start + size])
        released = released + more
        calls = calls + list(found)
    more, found = stream.finish()
    return released + more, [(call.name, json.loads(call.arguments)) for call in [*calls, *found]]


def looks() -> st.SearchStrategy[dict[str, Any]]:
    """Draw arguments of LOOK without characters of markup."""
    plain = st.text(st.characters(blacklist_characters="<>[]", blacklist_categories=["Cs"]), max_size=8)
    texts = plain.filter(lambda text: text == text.strip())
    return st.fixed_dictionaries({"at": texts}, optional={"times": st.integers(-5, 99)})


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_calls_are_read_as_the_template_writes_them(name: str, data: st.DataObject) -> None:
    calls: Calls = [("look", data.draw(looks()))]
    if name != "one call" and data.draw(st.booleans()):
        calls.append(data.draw(st.sampled_from([("time2", {}), ("look", {"at": "x"})])))
    text = RULES[name].written_calls(calls)
    assert text is not None
    assert read(name, text, data.draw(st.integers(1, 40))) == ("", calls)


@pytest.mark.parametrize("at", ["<![CDATA[x]]>", "<![CDATA[]]>", "<![CDATA[", "]]>", "<b>x</b>\ny"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith("tagged")])
def test_marks_of_cdata_in_a_value_are_text(name: str, at: str) -> None:
    """Only a template that writes them around a value has marks that are not the value's own."""
    calls: Calls = [("look", {"at": at})]
    text = RULES[name].written_calls(calls)
    assert text is not None
    assert read(name, text, 3) == ("", calls)


@pytest.mark.parametrize("at", ["a{}b", "{}", "{0}\n{0} x"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith("tagged")])
def test_a_value_may_have_the_tag_that_ends_it(name: str, at: str) -> None:
    """vLLM ends it there, and loses the rest."""
    calls: Calls = [
        ("look", {"at": at.format(FORMS[name].markup.value_end.strip()), "times": 3}),
        ("look", {"at": "x"}),
    ]
    text = RULES[name].written_calls(calls)
    assert text is not None
    for size in (1, 7, len(text)):
        assert read(name, text, size) == ("", calls)


@pytest.mark.parametrize("between", ["and\n", ""])
def test_an_argument_ends_before_the_next_call_if_its_end_tag_is_missing(between: str) -> None:
    look = '<invoke name="look">\n<parameter name="at">{}</parameter>\n'
    text = f"<group>\n{look.format('x')}</invoke>\n{between}{look.format('y')}</invoke>\n</group>"
    if not between:
        text = text.replace("</invoke>\n<invoke", "<invoke")
    _, calls = read("tagged", text, len(text))
    assert calls[:1] == [("look", {"at": "x"})]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", ["So: ", "Use <b> and [x], 1 < 2.\n"])
def test_text_before_a_call_stays(name: str, said: str) -> None:
    calls: Calls = [("look", {"at": "Paris"})]
    text = RULES[name].written_calls(calls)
    assert read(name, f"{said}{text}", 3) == (said, calls)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "one call"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_of_an_unknown_tool_is_text_after_a_known_one_too(name: str, size: int) -> None:
    text = RULES[name].written_calls([("look", {"at": "Paris"}), ("no_tool", {"at": "Rome"})])
    assert text is not None
    released, calls = read(name, text, size)
    assert calls == [("look", {"at": "Paris"})]
    assert "no_tool" in released
    assert "Rome" in released


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_beginning_of_a_call_without_one_is_text(name: str) -> None:
    begin = FORMS[name].begins[0]
    text = f"The tag {begin} begins a call, and this one goes on for as long as any sentence does. " * 9
    assert read(name, text, 7)[1] == []
    assert "".join(read(name, text, 7)[0].split()) == "".join(text.split())


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_numbers_identifiers_and_spaces_are_read(name: str) -> None:
    calls: Calls = [("look", {"at": "Paris"})]
    text = RULES[name].written_calls(calls)
    assert text is not None
    changed = re.sub(r":0\b", ":17", text.replace("a1b2c3d4e", "call_99")).replace("\n", "\n\n")
    assert read(name, changed, 5) == ("", calls)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_grammars_accept_calls_as_the_template_writes_them(tmp_path: Path, name: str, parallel: bool) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template(TEMPLATES[name]))
    tokenizer = Tokenizer.load(tmp_path)
    use = ToolUse([LOOK, CLOCK], "required", parallel)
    found = form_of(tokenizer, use).form
    assert isinstance(found, Written)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    rules = grammars.call_rules(use, found)[0]
    several: list[Calls] = [[("look", {"at": "Paris", "times": 3})], [("time2", {})]]
    if name != "one call":
        several.append([("look", {"at": "x"}), ("time2", {})])
    for calls in several:
        constraint = grammars.compile(None, "no", "", rules).start()
        ids = tokenizer.encode(RULES[name].written_calls(calls) or "", special=True)
        assert (constraint.allowed(ids) == len(ids)) == (parallel or len(calls) == 1)


@pytest.mark.parametrize(
    "calls",
    [
        "",
        _EACH
        + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}',
        _EACH + "<a>{{ call.function.name }}</a><b>{{ call.function.name }}</b>{{ call.function.arguments | tojson }}"
        "{% endfor %}",
    ],
)
def test_no_form_of_calls_is_derived_without_markers(calls: str) -> None:
    rules = TemplateRules(ChatTemplate({"default": template(calls)}), offers_tools=True)
    assert learn(rules.written_calls) is None
