"""Calls that a chat template writes: read back in pieces of any size, and accepted by the grammar of forced calls."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import form_name_of, form_of
from headrace.models.text.tools.use import ToolUse
from tests.support.tiny_chat import write_byte_tokenizer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string"},
                "times": {"type": "integer"},
                "deep": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"$ref": "#/$defs/options"},
                "note": {"type": ["string", "null"]},
                "unit": {"enum": ["m", "km"]},
            },
            "$defs": {"options": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            "required": ["at"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "time2", "parameters": {"type": "object", "properties": {}}}}

Calls = list[tuple[str, dict[str, Any]]]
RICH = {
    "at": 'Rue "d\'É</b>" 5\nParis',
    "times": 3,
    "deep": True,
    "tags": ["x", "y"],
    "options": {"a": 1},
    "note": "123",
    "unit": "km",
}
CALLS: dict[str, Calls] = {
    "one": [("look", {"at": "Paris"})],
    "all types": [("look", RICH)],
    "null": [("look", {"at": "null", "note": None})],
    "no arguments": [("time2", {})],
    "two tools": [("look", {"at": "Paris"}), ("time2", {})],
    "no arguments first": [("time2", {}), ("look", {"at": "Paris"})],
    "one tool twice": [("look", {"at": "a", "deep": False}), ("look", {"at": "b"})],
}


@dataclass(frozen=True)
class Case:
    """A template that has one behaviour.

    calls: writes the calls of `message`, each with `call.function`.
    form: the name of the form.
    control: control tokens of the vocabulary.
    without: names of calls that it cannot write.
    turn: text before each role.
    recipient: text before the recipient of each part of an answer.
    """

    calls: str
    form: str = "its own"
    control: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    turn: str = ""
    recipient: str = ""


_EACH = "{% for call in message.tool_calls %}"
_VALUE = "{{ value if value is string else value | tojson }}"
_ITEMS = "{% for key, value in call.function.arguments.items() %}"
_KIND = (
    "{{ 'boolean' if value is boolean else 'null' if value is none else 'number' if value is number "
    "else 'string' if value is string else 'object' if value is mapping else 'array' }}"
)
_WRITTEN_WITHOUT_QUOTES = (
    '{%- macro written(value) -%}{%- if value is string -%}<|"|>{{ value }}<|"|>'
    "{%- elif value is mapping -%}{{ '{' }}{% for key, item in value | dictsort %}{{ key }}:{{ written(item) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{%- elif value is iterable -%}[{% for item in value %}{{ written(item) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{%- else -%}{{ value | tojson }}{%- endif -%}{%- endmacro -%}"
)
_MARK = "]<]minimax[>["
_JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'

CASES = {
    "JSON in tags, one call a line": Case(
        _EACH + "<tool_call>\n" + _JSON_CALL + "\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}", "hermes"
    ),
    "JSON in tags without a line break between": Case(
        _EACH + "<tool_call>\n" + _JSON_CALL + "\n</tool_call>{% endfor %}", "hermes"
    ),
    "JSON in tags that end a line": Case(
        _EACH + "<tool_call>\n" + _JSON_CALL + "\n</tool_call>\n{% endfor %}", "hermes"
    ),
    "tagged, with Python's constants and no line break between": Case(
        _EACH + "<tool_call>\n<function={{ call.function.name }}>\n" + _ITEMS + "<parameter={{ key }}>\n"
        "{{ value | tojson if value is mapping or (value is iterable and value is not string) else value | string }}"
        "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        "qwen coder",
        without=frozenset(["null"]),
    ),
    "the end of the turn is another one after calls": Case(
        "<acts>[" + _EACH + '{"tool": "{{ call.function.name }}", "with": {{ call.function.arguments | tojson }}}'
        "{{ ', ' if not loop.last }}{% endfor %}]</acts><|im_end|>\nnext"
    ),
    "identifiers between name and arguments": Case(
        _EACH + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}",
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "JSON with nothing between": Case(
        "{# <|header_start|> #}" + _EACH + '{"name": "{{ call.function.name }}", "parameters": '
        "{{ call.function.arguments | tojson }}}{% endfor %}",
        "llama 4",
    ),
    "a list as Python writes it": Case(
        "{# <|header_start|> #}[" + _EACH + "{{ call.function.name }}(" + _ITEMS + "{{ key }}={{ value | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
        "python list",
    ),
    "a recipient that the prompt begins": Case(
        _EACH + ">>>{{ call.function.name }}\n{{ call.function.arguments | tojson }}{% endfor %}",
        "functionary",
        recipient=">>>",
    ),
    "a recipient before the channel": Case(
        _EACH + " to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
        "{{ call.function.arguments | tojson }}{% endfor %}",
        "harmony",
        ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
        without=frozenset(["two tools", "no arguments first", "one tool twice"]),
    ),
    "JSON with lines, and a turn of the system after calls": Case(
        "Action: ```[" + _EACH + '{"name": "{{ call.function.name }}", "parameters": '
        "{{ call.function.arguments | tojson(indent=2) }}}{{ ', ' if not loop.last }}{% endfor %}]```"
        "<|im_start|>system: end",
        turn="<|im_start|>",
    ),
    "a recipient before a message of tags": Case(
        "{# to=self<|message|> #}" + _EACH + "{{ '<|eom|><|start|>assistant' if not loop.first }} to="
        '{{ call.function.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ call.function.name }}">\n'
        + _ITEMS + '<atem:parameter name="{{ key }}">' + _VALUE + "</atem:parameter>\n{% endfor %}"
        "</atem:invoke>\n</atem:function_calls>{% endfor %}",
        "muse",
        ("<|message|>", "<|eom|>", "<|start|>"),
    ),
    "sorted keys without quotes, and texts between quotes of their own": Case(
        _WRITTEN_WITHOUT_QUOTES
        + _EACH
        + "<|tool_call>call:{{ call.function.name }}{{ written(call.function.arguments) }}<tool_call|>{% endfor %}",
        "gemma",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "tags named by parameters, nested": Case(
        "{%- macro nested(value) -%}{%- if value is mapping -%}{%- for key, item in value.items() -%}"
        + _MARK + "<{{ key }}>{{ nested(item) }}" + _MARK + "</{{ key }}>{%- endfor -%}"
        "{%- elif value is string -%}{{ value }}"
        "{%- elif value is number or value is boolean or value is none -%}{{ value | tojson }}"
        "{%- else -%}{%- for item in value -%}" + _MARK + "<item>{{ nested(item) }}" + _MARK + "</item>{%- endfor -%}"
        "{%- endif -%}{%- endmacro -%}" + _MARK + "<tool_call>\n" + _EACH + _MARK
        + '<invoke name="{{ call.function.name }}">{{ nested(call.function.arguments) }}' + _MARK
        + "</invoke>\n{% endfor %}" + _MARK + "</tool_call>",
        "nested",
        ("]<]minimax[>[",),
    ),
    "tags that say whether a value is a text": Case(
        "<|tag|>calls>\n" + _EACH + '<|tag|>call name="{{ call.function.name }}">\n' + _ITEMS + "<|tag|>parameter "
        'name="{{ key }}" string="{{ "true" if value is string else "false" }}">' + _VALUE + "</|tag|parameter>\n"
        "{% endfor %}</|tag|call>\n{% endfor %}</|tag|calls>"
    ),
    "control tokens within tags": Case(
        "<@calls>\n" + _EACH + '<@call name="{{ call.function.name }}">\n' + _ITEMS + '<@parameter name="{{ key }}" '
        'string="{{ "true" if value is string else "false" }}">' + _VALUE + "</@parameter>\n{% endfor %}"
        "{{ '\n' if not call.function.arguments }}</@call>\n{% endfor %}</@calls>",
        control=("@",),
    ),
    "tags that name the type of a value, and numbered calls": Case(
        "<|open|>tools<|sep|>" + _EACH + '<|open|>call tool="{{ call.function.name }}" index="{{ loop.index }}"<|sep|>'
        + _ITEMS + '<|open|>argument key="{{ key }}" type="' + _KIND + '"<|sep|>' + _VALUE + "<|close|>argument<|sep|>"
        "{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
        control=("<|open|>", "<|sep|>", "<|close|>"),
    ),
}  # fmt: skip


def tokenizer_of(directory: Path, case: Case) -> Tokenizer:
    write_byte_tokenizer(directory, *case.control)
    to_user = f"{case.recipient}all\n" if case.recipient else ""
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}" + case.turn + "[{{ message.role }}]"
        "{% if message.content %}" + to_user + "{{ message.content }}{% endif %}"
        "{% if message.tool_calls %}" + case.calls + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}" + case.turn + "[assistant]" + case.recipient + "{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer.load(directory)


def written(tokenizer: Tokenizer, calls: Calls) -> list[int]:
    """Return the tokens of calls as a model would generate them, without the end of its turn."""
    assert tokenizer.chat_template is not None
    text = TemplateRules(tokenizer.chat_template, offers_tools=True).written_calls(calls)
    assert text is not None
    return tokenizer.encode(re.split(r"<\|im_(?:start|end)\|>", text)[0].rstrip(), special=True)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_as_the_template_writes_them(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_of(tmp_path, case)
    assert form_name_of(tokenizer) == case.form
    form = form_of(tokenizer, ToolUse([LOOK, CLOCK]))
    for label, calls in CALLS.items():
        if label in case.without:
            continue
        tokens = written(tokenizer, calls)
        for size in (1, 3, len(tokens)):
            stream = ToolStream(form.form, form.marks)
            detokenizer = tokenizer.answer_stream(form.marks.character_of)
            text = ""
            read = []
            for start in range(0, len(tokens), size):
                piece = "".join(map(detokenizer.add, tokens[start : start + size]))
                released, completed = stream.feed(piece)
                text += released
                read += completed
            released, completed = stream.finish(detokenizer.finish())
            read += completed
            assert text + released == "", label
            assert [(call.name, json.loads(call.arguments)) for call in read] == calls, label


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_of_forced_calls_accepts_what_the_template_writes(
    tmp_path: Path, name: str, parallel: bool
) -> None:
    case = CASES[name]
    tokenizer = tokenizer_of(tmp_path, case)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    use = ToolUse([LOOK, CLOCK], "required", parallel)
    rules = grammars.call_rules(use, form_of(tokenizer, use).form)[0]
    for label, calls in CALLS.items():
        if label in case.without or (len(calls) > 1 and not parallel):
            continue
        constraint = grammars.compile(None, "no", "", rules).start()
        tokens = written(tokenizer, calls)
        assert constraint.allowed(tokens) == len(tokens), label
        constraint.accept(tokens)
        allowed = constraint.masks([]).tolist()[0]
        assert any(allowed[index] for index in grammars.trie.ends), label


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arguments", [{"at": "x", "options": {"a": "y"}}, {"at": "x", "times": "many"}, {"times": 3}])
def test_the_grammar_of_forced_calls_refuses_other_arguments(
    tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    tokenizer = tokenizer_of(tmp_path, CASES[name])
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    use = ToolUse([LOOK, CLOCK], "required")
    rules = grammars.call_rules(use, form_of(tokenizer, use).form)[0]
    tokens = written(tokenizer, [("look", arguments)])
    assert grammars.compile(None, "no", "", rules).start().allowed(tokens) < len(tokens)
