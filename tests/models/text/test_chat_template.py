"""Choice of the template, its variables, and the place of a system message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.models.text.chat_template import ChatTemplate, read_sources
from headrace.runtime.errors import CheckpointError, UsageError
from tests.support.families import FAMILIES

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
ECHO = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def test_a_chat_is_encoded_with_its_template() -> None:
    template = ChatTemplate({"default": FAMILIES["chatml"].template})
    chat = [SYSTEM, USER, {"role": "assistant", "content": "hello"}, USER]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    assert template.render(chat) == turns + "<|im_start|>assistant\n"
    assert template.render(chat, add_generation_prompt=False) == turns


def test_none_values_are_left_out() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ messages[0].tool_calls is defined }}"})
    assert template.render([{**USER, "tool_calls": None}]) == "hiFalse"


def test_variables_reach_the_template() -> None:
    template = ChatTemplate({"default": "{{ bos_token }}{{ mood }}{{ add_generation_prompt }}"}, {"bos_token": "<s>"})
    assert template.render([USER], mood="glad") == "<s>gladTrue"


def test_a_template_may_add_a_token_that_the_vocabulary_has_not() -> None:
    assert ChatTemplate({"default": "{{ bos_token + messages[0].content + eos_token }}"}).render([USER]) == "hi"


def test_the_tool_use_template_is_chosen_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | tojson }}"})
    assert template.render([USER]) == template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=[{"name": "é<"}]) == '[{"name": "é<"}]'


def test_an_infinite_number_in_a_template_is_one_error() -> None:
    """Jinja writes it into the code that it makes as `inf`, which is no name there."""
    with pytest.raises(CheckpointError, match="inf"):
        ChatTemplate({"default": "{{ 1e999 - messages[0].content }}"}).render([USER])


def test_json_is_written_as_transformers_does() -> None:
    value = {"b": ["<&'>", 1.5, None, True], "a": "é"}
    for options in ({}, {"indent": 4}, {"sort_keys": True}, {"separators": (",", ":")}, {"ensure_ascii": True}):
        given = ", ".join(f"{name}={option!r}" for name, option in options.items())
        template = ChatTemplate({"default": f"{{{{ v | tojson({given}) }}}}"})
        assert template.render([USER], v=value) == json.dumps(value, **{"ensure_ascii": False, **options})


def test_helpers_of_templates_work() -> None:
    source = """\
{% for i in range(9) %}
    {% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}
{{ i }}
{% endfor %}
{% generation %}said{% endgeneration %}{{ strftime_now('%Y')|length }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}\
{{ ns.x }}{{ dict(a=1) }}{{ 'a-b'.split('-') | join('+') }}{{ 'x'.upper() ~ 1 }}{{ '%s!' | format('y') }}\
{{ '{}-{}'.format(1, 2) }}{{ 'a\\nb' | indent(2) }}"""
    assert ChatTemplate({"default": source}).render([USER]) == "0\n2\nsaid42{'a': 1}a+bX1y!1-2a\n  b"


def test_a_macro_is_called_in_a_loop_that_sets_a_namespace() -> None:
    """jinja2 hands the variables of a loop to every call inside it (Gemma 4, GigaChat 3)."""
    source = """{% macro shown(text) %}[{{ text }}]{% endmacro %}{% for m in messages %}{% set ns = namespace(n=1) %}\
{% set kept = messages %}{{ shown(m.content.strip()) }}{{ m.get('role') }}{{ ns.n }}{% endfor %}"""
    assert ChatTemplate({"default": source}).render([{"role": "user", "content": " a "}]) == "[a]user1"


def test_a_template_may_change_its_lists() -> None:
    """Kimi K2 Thinking has a queue of identifiers."""
    source = "{% set n = namespace(ids=[]) %}{% for m in messages %}{% set _ = n.ids.append(m.role) %}{% endfor %}"
    template = ChatTemplate({"default": source + "{{ n.ids.pop(0) }}{{ messages.pop().content }}{{ n.ids }}"})
    assert template.render([USER, SYSTEM]) == template.render([USER, SYSTEM]) == "userbe brief['system']"


def test_a_list_may_be_spread_as_arguments() -> None:
    """Jamba calls macros so."""
    source = "{% macro f(a, b) %}[{{ a }}{{ b }}]{% endmacro %}{% for m in messages %}{{ f(*[m.role, m.content]) }}"
    assert ChatTemplate({"default": source + "{% endfor %}"}).render([USER]) == "[userhi]"


def test_a_template_may_set_fields_of_its_messages() -> None:
    """MiroThinker counts calls in them. The conversation itself stays as it is."""
    source = """{% for m in messages %}{% set m.size = m.content | length %}{% set m.role = 'you' %}{% endfor %}\
{% for m in messages %}{{ m.role }}{{ m.size }}{% endfor %}"""
    template = ChatTemplate({"default": source})
    chat = [USER, SYSTEM]
    assert template.render(chat) == template.render(chat) == "you2you8"
    assert USER["role"] == "user"


@pytest.mark.parametrize("call", ["'x'.join(['y'], _loop_vars=1)", "'{_loop_vars}'.format(_loop_vars='x' * 99)"])
def test_internal_arguments_of_jinja_are_refused(call: str) -> None:
    source = f"{{% for m in messages %}}{{{{ {call} }}}}{{% endfor %}}"
    with pytest.raises(CheckpointError):
        ChatTemplate({"default": source}).render([{"role": "user", "content": "a"}])


def test_content_in_parts_and_tool_calls_pass_through() -> None:
    template = ChatTemplate({"default": "{{ messages | tojson }}"})
    chat = [{"role": "user", "content": ({"type": "text", "text": "hi"},)}, {"role": "tool", "content": "1", "n": 2}]
    assert json.loads(template.render(chat)) == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "tool", "content": "1", "n": 2},
    ]


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([], "at least one message"),
        ([{"role": "im_end", "content": ""}], "im_end"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": Path()}], "not JSON"),
    ],
)
def test_malformed_messages_are_usage_errors(chat: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ChatTemplate({"default": ECHO}).render(chat)


def test_a_template_error_is_one_line() -> None:
    template = ChatTemplate({"default": FAMILIES["gemma2"].template}, {"bos_token": "<bos>"})
    with pytest.raises(CheckpointError, match="roles") as caught:
        template.render([USER, USER])
    assert "\n" not in str(caught.value)


# --- where sources come from -------------------------------------------------------------------------------


def test_a_template_file_overrides_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert read_sources(tmp_path, {}) == {}
    assert read_sources(tmp_path, config) == {"default": "config"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert read_sources(tmp_path, config) == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_sources(tmp_path, config) == {"default": "jinja"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert read_sources(tmp_path, config) == {"default": "jinja", "tool_use": "tools"}


def test_a_list_of_named_chat_templates_is_read(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_sources(tmp_path, {"chat_template": listed}) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("declared", [5, {"a": "b"}, [{"name": "x"}], ["x"], [None]])
def test_chat_templates_of_other_json_types_are_refused(tmp_path: Path, declared: object) -> None:
    with pytest.raises(CheckpointError, match="template"):
        read_sources(tmp_path, {"chat_template": declared})


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"x": 1}', b"{"])
def test_a_broken_template_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.json"):
        read_sources(tmp_path, {})


def test_jinja_is_not_imported_before_a_template_is_compiled() -> None:
    code = "import sys, headrace.models.text.tokenizer; assert not {'jinja2', 'tokenizers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("role", [["user"], {"a": 1}, None, "boss"])
def test_an_unknown_role_is_refused(role: Any) -> None:
    with pytest.raises(UsageError, match="role"):
        ChatTemplate({"default": "x"}).render([{"role": role, "content": "x"}])


def test_a_loop_has_the_fields_of_jinja() -> None:
    fields = ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0")
    source = "{% for m in messages %}" + "".join("{{ loop." + field + " }}," for field in fields) + "{% endfor %}"
    assert ChatTemplate({"default": source}).render([USER]) == "1,0,1,0,True,True,1,1,0,"
    calls = "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.previtem is defined }}{{ loop.nextitem.role }}"
    source = "{% for m in messages[:1] + messages %}" + calls + "{% break %}{% endfor %}"
    assert ChatTemplate({"default": source}).render([USER]) == "aTrueFalseuser"


def test_a_block_sets_a_field_of_a_namespace_or_of_an_object() -> None:
    source = """{% set ns = namespace(a='') %}{% for m in messages %}\
{% set ns.a %}{{ ns.a }}<{{ m.content }}>{% endset %}\
{% set m.role | upper %}from {{ m.role }}{% endset %}{{ m.role }}{% endfor %}{{ ns.a }}"""
    assert ChatTemplate({"default": source}).render([USER]) == f"FROM USER<{USER['content']}>"


def test_two_fields_of_a_namespace_are_set_at_once() -> None:
    source = "{% set ns = namespace() %}{% set ns.a, b, ns.c = 1, 2, 3 %}{{ ns.a }}{{ b }}{{ ns.c }}"
    assert ChatTemplate({"default": source}).render([USER]) == "123"
