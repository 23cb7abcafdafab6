"""Facts about templates: where system messages may stand, the form of calls, the thinking."""

from pathlib import Path

import pytest

from headrace.app.model_info.chat_facts import chat_facts, chat_line
from tests.support.tiny_chat import write_byte_tokenizer

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
_TURNS += "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_TURNS += "<|im_end|>{% endfor %}<|im_start|>assistant\n"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_NO_SYSTEM = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endfor %}"
_NO_LATER_SYSTEM = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('not first') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}",
            "system messages anywhere; tools in a text of headrace's, calls as plain JSON; does not think",
        ),
        (
            _NO_LATER_SYSTEM + _TOOLS + _TURNS,
            "one system message, at the beginning; tools, calls in hermes form; does not think",
        ),
        (
            _NO_SYSTEM + _TOOLS + _TURNS + "<think>\n{# </think> {{ reasoning_effort }} #}",
            "no system messages: they become text of the user's; tools, calls in hermes form; thinks in <think>, "
            "with levels",
        ),
    ],
)
def test_the_facts_of_a_template_are_one_line(template: str, line: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_line(chat_facts(tmp_path)) == line


def test_a_model_without_a_template_is_reported_as_such(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert chat_facts(tmp_path) is None
    assert chat_line(None) == "no template that can be rendered: `run --raw` continues a text"
