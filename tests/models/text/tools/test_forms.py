"""Tool calls in the forms of model families: read whole and in pieces of any size, and written by forced grammars."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import Tool, ToolCall, typed_value
from headrace.models.text.tools.form import MarkupTokens
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import _MARKUP, FORMS, form_name, form_of
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.errors import UsageError
from tests.support.tiny_chat import write_byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"], "type": "string"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
TOOLS = ToolUse([WEATHER, CLOCK])
PARIS = '{"city": "Paris", "days": 3}'
TRICKY = {"city": 'a "}]</x> é\n{', "days": 3}
TRICKY_TEXT = json.dumps(TRICKY, ensure_ascii=False)

M3 = "]<]minimax[>["

# Form -> answers as models of the family write them, and the text and calls in each.
RECORDED: dict[str, list[tuple[str, str, list[tuple[str, Any]]]]] = {
    "hermes": [
        (f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "", [("get_weather", PARIS)]),
        (
            f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {TRICKY_TEXT}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
            "I look.\n",
            [("get_weather", TRICKY), ("time", {})],
        ),
        (
            '<think>\n<tool_call> or not?\n</think>\n\n<tool_call>{"name": "time", "arguments": {}}</tool_call>',
            "<think>\n<tool_call> or not?\n</think>",
            [("time", {})],
        ),
        ("Use <tool_call> tags.", "Use <tool_call> tags.", []),
        ("a < b <tool_cal", "a < b <tool_cal", []),
        ('<tool_call>{"name": 3}</tool_call> x', '<tool_call>{"name": 3}</tool_call> x', []),
    ],
    "qwen coder": [
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", {"city": "New\nYork", "days": 3})],
        ),
        ("<tool_call>\n<function=time>\n</function>\n</tool_call>", "", [("time", {})]),
        ("<function=time>\n</function>", "", [("time", {})]),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\na</function>b\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", {"city": "a</function>b", "days": 3})],
        ),
        ("a <function x", "a <function x", []),
    ],
    "llama": [
        (f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
        (
            '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}',
            "",
            [("time", {}), ("time", {})],
        ),
        (f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('{"a": 1} is JSON', '{"a": 1} is JSON', []),
        ("{a set}", "{a set}", []),
        (
            '[get_weather(city="a )]", days=3), time()]',
            "",
            [("get_weather", {"city": "a )]", "days": 3}), ("time", {})],
        ),
        ("[get_weath", "[get_weath", []),
        ("[get_weather](url)", "[get_weather](url)", []),
        ("[other(city=1)]", "[other(city=1)]", []),
    ],
    "llama 4": [
        (
            f'<|python_start|>{{"name": "get_weather", "parameters": {PARIS}}}<|python_end|>',
            "",
            [("get_weather", PARIS)],
        ),
        (
            '<|python_start|>[get_weather(city="Paris", days=3), time()]<|python_end|>',
            "",
            [("get_weather", PARIS), ("time", {})],
        ),
        (
            f'<|python_start|><|python_end|>{{"name": "get_weather", "parameters": {PARIS}}}'
            '{"name": "time", "parameters": {}}',
            "",
            [("get_weather", PARIS), ("time", {})],
        ),
        ("[time(), time()]", "", [("time", {}), ("time", {})]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "a1b2c3d4e"}}]',
            "",
            [("get_weather", PARIS)],
        ),
        (
            'Yes.[TOOL_CALLS] [{"name": "time", "arguments": {}}, '
            f'{{"name": "get_weather", "arguments": {PARIS}}}]',
            "Yes.",
            [("time", {}), ("get_weather", PARIS)],
        ),
        (
            f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{{}}",
            "",
            [("get_weather", PARIS), ("time", {})],
        ),
        (f"[TOOL_CALLS]get_weather{PARIS}", "", [("get_weather", PARIS)]),
        ("[a list] of [TOOLS]", "[a list] of [TOOLS]", []),
    ],
    "gemma": [
        ("<|tool_call>call:get_weather{city:None}<tool_call|>", "", [("get_weather", {"city": None})]),
        (
            '<|tool_call>call:get_weather{city:<|"|>Par, is}<|"|>,days:3}<tool_call|>',
            "",
            [("get_weather", {"city": "Par, is}", "days": 3})],
        ),
        (
            'Now.<|tool_call>call:time{}<tool_call|><|tool_call>call:get_weather{city:<|"|>a<|"|>,more:{a:[1,true,<|"|>x<|"|>]}}<tool_call|>',
            "Now.",
            [("time", {}), ("get_weather", {"city": "a", "more": {"a": [1, True, "x"]}})],
        ),
        ("call:time{}", "call:time{}", []),
    ],
    "function gemma": [
        (
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
            "",
            [("get_weather", PARIS)],
        ),
    ],
    "glm": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
            "",
            [("get_weather", PARIS)],
        ),
        ("Good.\n<tool_call>time\n</tool_call><tool_call>time</tool_call>", "Good.\n", [("time", {}), ("time", {})]),
        ("<tool_call>(none)", "<tool_call>(none)", []),
    ],
    "deepseek": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{TRICKY_TEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("get_weather", TRICKY)],
        ),
        (
            f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So.",
            [("get_weather", PARIS), ("time", {})],
        ),
    ],
    "deepseek tagged": [
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "",
            [("get_weather", PARIS)],
        ),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]', "", [("get_weather", PARIS)]),
        (
            f'<|tool_call|>[{{"name": "time", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {PARIS}}}]',
            "",
            [("time", {}), ("get_weather", PARIS)],
        ),
    ],
    "pythonic": [
        (
            '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>Checking.',
            "Checking.",
            [("get_weather", PARIS)],
        ),
        (
            f"I look. <|tool_call_start|>[get_weather(city={json.dumps(TRICKY['city'])}, days=3), time()]"
            "<|tool_call_end|>",
            "I look. ",
            [("get_weather", TRICKY), ("time", {})],
        ),
        (
            "<|tool_call_start|>[a.b(x=[1, -2.5, True, null], y={'k': (\"v\", None)})]<|tool_call_end|>",
            "",
            [("a.b", {"x": [1, -2.5, True, None], "y": {"k": ["v", None]}})],
        ),
        (
            '<|tool_call_start|>[list-tabs(from="a, b=(", file-path=[1]), 2nd.tool:x()]<|tool_call_end|>',
            "",
            [("list-tabs", {"from": "a, b=(", "file-path": [1]}), ("2nd.tool:x", {})],
        ),
        (
            "<|tool_call_start|>[__import__('os')]<|tool_call_end|>",
            "<|tool_call_start|>[__import__('os')]<|tool_call_end|>",
            [],
        ),
    ],
    "python list": [
        (
            '[get_weather(city="a, b)]=(", days=3), time()]',
            "",
            [("get_weather", {"city": "a, b)]=(", "days": 3}), ("time", {})],
        ),
        ("[1, 2] is a list", "[1, 2] is a list", []),
    ],
    "nested": [
        (
            f'Hm.{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>New\nYork <b>{M3}</city>{M3}<days>3'
            f'{M3}</days>{M3}</invoke>\n{M3}<invoke name="time">{M3}</invoke>\n{M3}</tool_call>',
            "Hm.",
            [("get_weather", {"city": "New\nYork <b>", "days": 3}), ("time", {})],
        ),
        (
            f'{M3}<tool_call>{M3}<invoke name="other">{M3}<list>{M3}<item>1{M3}</item>{M3}<item>{M3}<a>b{M3}</a>'
            f"{M3}</item>{M3}</list>{M3}<none>{M3}</none>{M3}</invoke>{M3}</tool_call>",
            "",
            [("other", {"list": [1, {"a": "b"}], "none": ""})],
        ),
        (f"{M3}<tool_call> is markup", f"{M3}<tool_call> is markup", []),
    ],
    "generic": [
        (f'{{"name": "get_weather", "arguments": {PARIS}}}', "", [("get_weather", PARIS)]),
        (
            f'{{"name": "get_weather", "arguments": {PARIS}}},{{"name": "time", "arguments": {{}}}}, {{"a": 1}}',
            ', {"a": 1}',
            [("get_weather", PARIS), ("time", {})],
        ),
        (f'```json\n{{"name": "get_weather", "arguments": {TRICKY_TEXT}}}\n```', "", [("get_weather", TRICKY)]),
        ('[{"name": "time", "arguments": {}}]', "", [("time", {})]),
        ('```python\nprint({"name": "time"})\n```', '```python\nprint({"name": "time"})\n```', []),
        ('{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
        ("[1, 2", "[1, 2", []),
    ],
    "harmony": [
        (
            f"Hm.{CALL_BEGIN}functions.get_weather{CALL_MESSAGE}{PARIS}",
            "Hm.",
            [("get_weather", PARIS)],
        ),
        (f"{CALL_BEGIN}functions.time{CALL_MESSAGE}", "", [("time", {})]),
    ],
}
ANSWERS = [(name, *answer) for name, answers in RECORDED.items() for answer in answers]


def _stream(name: str, special: bool) -> tuple[ToolStream, MarkupTokens]:
    """Return a stream of a form, whose control tokens are special or text."""
    ids = {text: 1000 + place for place, text in enumerate(_MARKUP)}
    marks = MarkupTokens(_MARKUP, ids.get, frozenset(ids.values()) if special else frozenset())
    source = "```json" if name == "deepseek" else ""
    return ToolStream(
        FORMS[name][1](marks, TOOLS.tools, f"tool▁calls▁begin{source}" * ("tagged" not in name)), marks
    ), marks


def _read(name: str, pieces: Sequence[str], *, special: bool) -> tuple[str, list[ToolCall]]:
    stream, _ = _stream(name, special)
    text = ""
    calls = list[ToolCall]()
    for piece in pieces:
        released, completed = stream.feed(piece)
        text += released
        calls += completed
    released, completed = stream.finish()
    return text + released, calls + list(completed)


def _expected(calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(value) if isinstance(value, str) else value) for name, value in calls]


@pytest.mark.sampled
@pytest.mark.parametrize("name", RECORDED)
@given(data=st.data())
def test_calls_are_read_in_any_pieces(name: str, data: st.DataObject) -> None:
    """No piece of the text has markup of a call, and text that looks like it comes out whole."""
    answer, text, calls = data.draw(st.sampled_from(RECORDED[name]))
    special = data.draw(st.booleans()) and bool(calls) and "<think>" not in answer
    if special:
        answer = _stream(name, special)[1](answer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    found, read = _read(name, pieces, special=special)
    assert found == text
    assert [(call.name, json.loads(call.arguments)) for call in read] == _expected(calls)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "answer", "text", "calls"), ANSWERS)
def test_calls_are_read_character_by_character(name: str, answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    found, read = _read(name, list(answer), special=False)
    assert (found, [(call.name, json.loads(call.arguments)) for call in read]) == (text, _expected(calls))


IN_PARTS = sorted(
    RECORDED.keys()
    - {"pythonic", "python list", "qwen coder", "gemma", "function gemma", "glm", "deepseek tagged", "nested"}
)
"""Forms whose arguments are JSON."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", IN_PARTS)
@given(data=st.data())
def test_arguments_come_before_a_call_is_complete(name: str, data: st.DataObject) -> None:
    """In pieces of any size the parts join to the arguments, and none comes behind its call."""
    answer, _, calls = data.draw(st.sampled_from([one for one in RECORDED[name] if one[2] and "<think>" not in one[0]]))
    special = data.draw(st.booleans())
    plain, marks = _stream(name, special)
    stream = ToolStream(plain._form, marks, certain=True)
    answer = marks(answer) if special else answer
    cuts = sorted({0, len(answer), *data.draw(st.lists(st.integers(0, len(answer)), max_size=30))})
    texts = dict[int, str]()
    complete = 0
    for a, b in pairwise(cuts):
        _, done = stream.feed(answer[a:b])
        for delta in stream.take_deltas():
            assert delta.index >= complete
            assert delta.name == calls[delta.index][0]
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        complete += len(done)
    assert complete + len(stream.finish()[1]) == len(calls)
    for index, text in texts.items():
        assert json.loads(text) == _expected(calls)[index][1]


@pytest.mark.parametrize("name", IN_PARTS)
def test_each_character_of_arguments_is_a_part(name: str) -> None:
    answer = next(answer for answer, _, calls in RECORDED[name] if any(value != {} for _, value in calls))
    plain, marks = _stream(name, special=False)
    stream = ToolStream(plain._form, marks, certain=True)
    deltas = list[str]()
    for char in answer:
        stream.feed(char)
        deltas += [delta.text for delta in stream.take_deltas()]
    assert len(deltas) > 10
    assert set(map(len, deltas)) == {1}


def test_nothing_as_python_prints_it_is_null_where_the_schema_allows_it() -> None:
    tool = Tool("look", {"properties": {"note": {"type": ["string", "null"]}, "text": {"type": "string"}}})
    assert typed_value(tool, "note", "None") is None
    assert typed_value(tool, "note", "Nonesuch") == "Nonesuch"
    assert [typed_value(tool, name, "None") for name in ("text", "unknown")] == ["None", "None"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", RECORDED)
@given(text=st.text(st.sampled_from('<>|[]{}"\\ntool_calfunction=`json:,▁｜ A1é'), max_size=60))
def test_text_without_calls_is_unchanged(name: str, text: str) -> None:
    found, calls = _read(name, list(text), special=False)
    assert calls or found == text or not text.strip()


def test_text_is_not_held_longer_than_it_may_be_a_call() -> None:
    stream, _ = _stream("hermes", special=False)
    assert stream.feed("Well, a < b")[0] == "Well, a < b"
    assert stream.feed(" <tool")[0] == " "
    assert stream.feed("box>")[0] == "<toolbox>"


CUT_ARGUMENTS = '{"days": 3, "city": "Par'
# Form -> an answer that a limit cuts within a text.
CUT = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {CUT_ARGUMENTS}',
    "llama": f'{{"name": "get_weather", "parameters": {CUT_ARGUMENTS}',
    "llama 4": '<|python_start|>[get_weather(days=3, city="Par',
    "generic": f'{{"name": "get_weather", "arguments": {CUT_ARGUMENTS}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CUT_ARGUMENTS}',
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {CUT_ARGUMENTS}',
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CUT_ARGUMENTS}",
    "deepseek tagged": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="city" string="true">Par',
    "qwen coder": "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nPar",
    "glm": "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>city</arg_key>\n"
    "<arg_value>Par",
    "gemma": '<|tool_call>call:get_weather{days:3,city:<|"|>Par',
    "function gemma": "<start_function_call>call:get_weather{days:3,city:<escape>Par",
    "pythonic": '<|tool_call_start|>[get_weather(days=3, city="Par',
    "python list": '[get_weather(days=3, city="Par',
    "nested": f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<days>3{M3}</days>{M3}<city>Par',
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_a_cut_call_has_its_arguments_so_far(name: str, special: bool) -> None:
    answer = CUT[name]
    stream, marks = _stream(name, special)
    answer = marks(answer) if special else answer
    released = ""
    calls = list[ToolCall]()
    for char in answer:
        text, completed = stream.feed(char)
        released = released + text
        calls = [*calls, *completed]
    text, completed = stream.finish(cut=True)
    assert released + text == ""
    assert [(call.name, call.arguments) for call in [*calls, *completed]] == [("get_weather", CUT_ARGUMENTS)]


@pytest.mark.parametrize(
    ("name", "answer", "calls"),
    [
        ("llama", '<|python_tag|>{"name": "other", "parameters": {"a', [("other", '{"a')]),
        ("llama 4", '<|python_start|>{"name": "other", "parameters": {"a', [("other", '{"a')]),
        ("llama 4", '<|python_start|><|python_end|>[get_weather(city="Par', [("get_weather", '{"city": "Par')]),
        ("llama", '{"name": "other", "parameters": {"a', []),
    ],
)
def test_a_cut_call_of_llama_is_read_by_the_rules_of_whole_calls(
    name: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    stream, _ = _stream(name, special=False)
    stream.feed(answer)
    _, completed = stream.finish(cut=True)
    assert [(call.name, call.arguments) for call in completed] == calls


@pytest.mark.parametrize("name", CUT)
def test_all_text_of_a_cut_answer_is_kept(name: str) -> None:
    """Cut at any place, an answer is text, or a call with a beginning of its arguments."""
    answer = CUT[name]
    for length in range(1, len(answer)):
        stream, _ = _stream(name, special=False)
        released, _ = stream.feed(answer[:length])
        text, calls = stream.finish(cut=True)
        if calls:
            assert [(call.name, CUT_ARGUMENTS.startswith(call.arguments)) for call in calls] == [("get_weather", True)]
        assert released + text == ("" if calls else answer[:length])


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("pythonic", '<|tool_call_start|>[get_weather(city="Paris", days=3), ti'),
        (
            "deepseek tagged",
            RECORDED["deepseek tagged"][0][0].replace("</｜DSML｜function_calls>", '<｜DSML｜invoke name="ti'),
        ),
    ],
)
def test_calls_before_an_incomplete_call_are_complete(name: str, cut: str) -> None:
    stream, _ = _stream(name, special=False)
    assert stream.feed(cut) == ("", ())
    _, [call] = stream.finish(cut=True)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(PARIS))


def test_an_incomplete_call_in_a_finished_answer_is_text() -> None:
    stream, _ = _stream("hermes", special=False)
    assert stream.feed('So: <tool_call>{"name"')[0] == "So: "
    assert stream.finish()[0] == '<tool_call>{"name"'


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ tools }}<tool_call>\n{'name': <function-name>}", "hermes"),
        ("<tool_call>\n<function=example>", "qwen coder"),
        ("<|start_header_id|>ipython {'parameters': x}", "llama"),
        ("<|header_start|>ipython", "llama 4"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|channel|>commentary to=functions.x<|message|>", "harmony"),
        ("<|tool_call>call:x<tool_call|>", "gemma"),
        ("<tool_call><arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_call|>", "granite"),
        ("<|tool_call_start|>[x()]<|tool_call_end|>", "pythonic"),
        ("]<]minimax[>[<tool_call>", "nested"),
        ("[probe_tool_x(a=1)]", "python list"),
        ("{{ messages }}", "generic"),
    ],
)
def test_the_form_of_calls_is_found_from_the_template(source: str, name: str) -> None:
    assert form_name(source) == name


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and the control tokens of all forms."""
    directory = tmp_path_factory.mktemp("vocabulary")
    write_byte_tokenizer(directory)
    file = directory / "tokenizer.json"
    document = json.loads(file.read_text())
    channels = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    for text in dict.fromkeys([*_MARKUP, *channels]):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        document["added_tokens"].append({"id": 256 + len(document["added_tokens"]), "content": text, **flags})
    file.write_text(json.dumps(document))
    return Tokenizer.load(directory)


_ENDS = (
    "\n</parameter>\n",
    "</arg_value>\n",
    '<|"|>',
    "<escape>",
    "</｜DSML｜parameter>\n",
    f"{M3}</city>",
    '"',
)  # of texts


def _walk(grammars: Grammars, rules: Any, chance: random.Random) -> list[int]:
    """Return a random answer of a grammar; quotes, brackets and markup are preferred, so that it ends."""
    constraint = grammars.compile(None, "no", "", rules).start()
    tokens = list[int]()
    tokenizer = grammars._tokenizer
    ends = [tokenizer.encode(text, special=True) for text in _ENDS]
    while True:
        for end in ends:
            if chance.random() < 0.5 and constraint.allowed(end) == len(end):
                constraint.accept(end)
                tokens += end
        allowed = [index for index, allowed in enumerate(constraint.masks([]).tolist()[0]) if allowed]
        closing = [i for i in allowed if i >= 256 or grammars.trie.tokens[i] in (b'"', b"}", b"]", b"<")]
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        if token in grammars.trie.ends:
            return tokens
        assert len(tokens) < 5000
        constraint.accept([token])
        tokens.append(token)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FORMS if name != "muse"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_forced_calls_fit_the_tool(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, special: bool
) -> None:
    """The grammar of a form writes what the form reads, with arguments of the schema."""
    if not special:
        write_byte_tokenizer(tmp_path)
        tokenizer = Tokenizer.load(tmp_path)
        if name == "harmony":
            pytest.skip("Harmony has control tokens")
    elif name == "generic":
        pytest.skip("these control tokens are those of a form")
    source = "```json" if name == "deepseek" else ""
    texts = "".join(FORMS[name][0]) or "none"
    monkeypatch.setattr(tokenizer, "template_source", texts + source)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    chance = random.Random(7)
    schemas = {"get_weather": WEATHER["function"]["parameters"], "time": {"type": "object"}}  # type: ignore[index]
    for choice in ("required", "get_weather"):
        use = ToolUse([WEATHER, CLOCK], choice)
        form = form_of(tokenizer, use)
        rules, _ = grammars.call_rules(use, form.form)
        assert rules is not None
        for _ in range(4):
            stream = ToolStream(form.form, form.marks)
            detokenizer = tokenizer.answer_stream(form.marks.character_of)
            text = ""
            calls = list[ToolCall]()
            for token in _walk(grammars, rules, chance):
                released, completed = stream.feed(detokenizer.add(token))
                text = text + released
                calls = calls + list(completed)
            released, completed = stream.finish(detokenizer.finish())
            calls += completed
            assert text + released == ""
            assert calls
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
                assert choice in ("required", call.name)


@pytest.mark.parametrize(("name", "separator"), [("llama", "; "), ("llama 4", "")])
def test_forced_calls_of_llama_have_the_separator_of_their_version(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str, separator: str
) -> None:
    monkeypatch.setattr(tokenizer, "template_source", "".join(FORMS[name][0]))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    use = ToolUse([CLOCK], "required")
    rules, _ = grammars.call_rules(use, form_of(tokenizer, use).form)
    assert rules is not None
    call = '{"name": "time", "parameters": {}}'
    for between in ("; ", ";", "", "\n"):
        tokens = grammars.trie(f"{call}{between}{call}")
        num_allowed = grammars.compile(None, "no", "", rules).start().allowed(tokens)
        assert (num_allowed == len(tokens)) == (between == separator), between


UNMARKED = ("functionary", "llama", "llama 4", "python list", "muse", "generic")


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FORMS if name not in UNMARKED])
def test_an_optional_call_is_constrained_from_its_markup_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tokenizer, "template_source", "".join(FORMS[name][0]))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    form = form_of(tokenizer, TOOLS)
    constraint = grammars.compile(None, "no", "", grammars.call_rules(TOOLS, form.form)[0]).start()
    if name != "harmony":  # whose text has a channel
        constraint.accept(grammars.trie("I {look}: "))
        assert constraint.masks([]).tolist()[0][grammars.trie.ends[0]]
    begin = tokenizer.encode(form.form.rule_begin, special=True)
    constraint.accept(begin)
    assert not constraint.masks([]).tolist()[0][grammars.trie.ends[0]]
    assert constraint.allowed(grammars.trie("~")) == 0


def test_a_tool_that_cannot_be_honoured_is_free_unless_it_is_forced(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    use = ToolUse([{"type": "function", "function": odd}])
    form = FORMS["hermes"][1](form_of(tokenizer, use).marks, use.tools, "")
    assert grammars.call_rules(use, form)[0] is not None
    for forced in (
        ToolUse([{"type": "function", "function": odd}], "odd"),
        ToolUse([{"type": "function", "function": {**odd, "strict": True}}]),
    ):
        with pytest.raises(UsageError, match=r"odd.*not"):
            grammars.call_rules(forced, form)


CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 5, 999])
@pytest.mark.parametrize(
    ("answer", "text", "count"),
    [
        (f"<think>Look.\n{CALL}", "<think>Look.\n\n</think>\n\n", 1),
        (f"<think>Look.\n{CALL}\n{CALL}\n", "<think>Look.\n\n</think>\n\n", 2),
        (f"<think>Say {CALL}?</think>No.", f"<think>Say {CALL}?</think>No.", 0),
        (f"<think>Say {CALL}?</think>{CALL}", f"<think>Say {CALL}?</think>", 1),
        ("<think>The tag <tool_call> is markup.", "<think>The tag <tool_call> is markup.", 0),
    ],
)
def test_a_call_ends_thinking_that_nothing_else_ends(answer: str, text: str, count: int, size: int) -> None:
    found, calls = _read("hermes", [answer[at : at + size] for at in range(0, len(answer), size)], special=False)
    assert (found, len(calls)) == (text, count)
    assert all(json.loads(call.arguments) == json.loads(PARIS) for call in calls)


def test_a_function_without_parameters_takes_none() -> None:
    for parameters in ({}, {"type": "object", "properties": {}}):
        assert Tool("look", parameters).schema["additionalProperties"] is False
    assert "additionalProperties" not in Tool("look", {"type": "object"}).schema
