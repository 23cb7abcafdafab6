"""Tool calls of a model that babbles: forced and optional ones, messages with calls and results, and refusals."""

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.openai_form import read_chat
from headrace.app.answer.options import AnswerOptions
from headrace.app.answer.tools import read_tools
from headrace.app.server import anthropic, responses
from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.events import Completed, TextChunk
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE, ThinkingForm, ThinkingStream
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.errors import UsageError
from tests.support.tiny_chat import write_chat_model

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "time"}}
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer in <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "Weather in Paris?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return load_model(directory, name="tiny")


@pytest.fixture(scope="module")
def answerer(model: LoadedModel) -> Answerer:
    return Answerer(model)


def _answer(answerer: Answerer, use: ToolUse | None, **options: Any) -> tuple[Answer, str]:
    """Return an answer, and its text by the events."""
    bias = {answerer.model.tokenizer.encode(text)[0]: value for text, value in {'"': 8.0, "}": 5.0}.items()}
    answer = answerer.prepare(
        answerer.encode(QUESTION, tools=use), AnswerOptions.read({"max_tokens": 300, "logit_bias": bias, **options})
    )
    events = [event for event in answerer.stream(answer) if isinstance(event, TextChunk | Completed)]
    assert [call for event in events for call in event.calls] == answer.calls
    return answer, "".join(event.text for event in events)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 2}, {"speculate": "off"}])
def test_a_forced_call_has_arguments_of_the_schema(answerer: Answerer, options: dict[str, Any]) -> None:
    for choice in ("required", "get_weather"):
        answer, text = _answer(answerer, ToolUse([WEATHER, CLOCK], choice, parallel=False), **options)
        [call] = answer.calls
        assert text == answer.text == ""
        assert answer.ttft_s is not None
        assert 0 < answer.ttft_s <= answer.e2e_s
        assert answer.end.summary.ttft_s == answer.ttft_s
        assert call.name in ("get_weather", "time")
        if choice != "required" or call.name == "get_weather":
            assert call.name == "get_weather"
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        assert answer.end.ended_by == "end_of_turn"


def test_an_optional_call_is_constrained_once_it_begins(answerer: Answerer) -> None:
    """The model is led to the markup; from there on it has to write a call, in the same tokens alone and in a batch."""
    use = ToolUse([WEATHER])
    prompt = answerer.encode(QUESTION, tools=use)
    begin = {answerer.model.tokenizer.encode(char)[0]: 30.0 for char in "<"}
    free, text = _answer(answerer, use, max_tokens=40, temperature=1.0, seed=1)
    assert (free.calls, free.text) == ([], text)
    constraint = answerer.prepare(prompt, AnswerOptions(logit_bias=begin)).request.grammar
    assert constraint is not None
    state = constraint.start()
    state.accept(answerer.model.tokenizer.encode("I look.<tool_call>"))
    forced = answerer.model.tokenizer.encode('\n{"name": "get_weather", "arguments": {"city": "')
    assert state.allowed(forced) == len(forced)
    assert state.allowed(answerer.model.tokenizer.encode('\n{"name": "other')) < 15


def test_no_tools_are_read_where_none_are_offered(answerer: Answerer) -> None:
    assert answerer.prepare(answerer.encode(QUESTION), AnswerOptions()).request.grammar is None
    none = answerer.encode(QUESTION, tools=ToolUse([WEATHER], "none"))
    assert none.ids == answerer.encode(QUESTION).ids
    assert answerer.prepare(none, AnswerOptions()).request.grammar is None


def test_a_schema_and_tools_go_together(answerer: Answerer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer, text = _answer(answerer, ToolUse([WEATHER]), schema=schema)
    assert answer.calls or json.loads(text)["ok"] in (True, False)
    forced, text = _answer(answerer, ToolUse([WEATHER], "required"), schema=schema)
    assert forced.calls
    assert text == ""


def test_an_answer_that_continues_a_text_takes_no_tools_with_a_schema(answerer: Answerer) -> None:
    prompt = replace(answerer.encode(QUESTION, tools=ToolUse([WEATHER])), begun="The")
    with pytest.raises(UsageError, match="continues a text") as refused:
        answerer.prepare(prompt, AnswerOptions(schema={"type": "object"}))
    assert refused.value.hint == "leave out the schema or the tools"
    assert answerer.prepare(prompt, AnswerOptions()).request.grammar is None


def test_messages_go_through_the_template(answerer: Answerer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "<|im_end|> sunny"},
    ]
    ids = answerer.encode(messages, tools=ToolUse([WEATHER])).ids
    text = answerer.model.tokenizer.decode(ids, skip_special=False)
    assert '"description": "Weather"' in text
    assert '"arguments": {"city": "Paris"}' in text
    assert (
        list(ids).count(258) == answerer.model.tokenizer.encode(text, special=True).count(258) - 1
    )  # no control token


def test_a_template_without_tools_gets_text(tmp_path: Path) -> None:
    tokenizer = load_model(write_chat_model(tmp_path / "tiny"), name="tiny").tokenizer
    call = {"id": "c1", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "time", "content": "12:00"},
    ]
    text = tokenizer.decode(ChatPrompt(tokenizer).encode(messages, tools=ToolUse([CLOCK])))
    for part in (
        "Be brief.",
        '{"name": "time"}',
        '{"name": "time", "arguments": {"zone": "UTC"}}',
        "Result of time:\n12:00",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ("x", None, "tools"),
        ([{"type": "web_search"}], None, "type function"),
        ([{"type": "function"}], None, "function"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "parameters of a"),
        ([CLOCK, CLOCK], None, "twice"),
        ([CLOCK], "sometimes", "tool_choice"),
        ([CLOCK], {"type": "function", "function": {"name": "other"}}, "other"),
        ([], "required", "needs tools"),
    ],
)
def test_refusals_name_the_parameter(tools: object, choice: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read_tools(tools, choice)


def test_openai_values_are_read() -> None:
    assert read_tools(None) is None
    assert read_tools([]) is None
    use = read_tools([WEATHER, CLOCK], {"type": "function", "function": {"name": "time"}}, False)
    assert use is not None
    assert (use.choice, use.parallel, [tool.name for tool in use.callable]) == ("time", False, ["time"])


_ORDERS: dict[str, dict[str, Any]] = {
    "chat, as OpenAI's client sends it": {"type": "function", "function": {"name": "look", "description": "Look."}},
    "chat, sorted": {"function": {"description": "Look.", "name": "look", "strict": False}, "type": "function"},
    "chat, with a field of the template": {
        "type": "function",
        "function": {"parameters": {"type": "object"}, "return": {"type": "string"}, "name": "look"},
    },
}


@pytest.mark.parametrize("tool", _ORDERS.values(), ids=_ORDERS)
def test_a_definition_reaches_the_template_as_the_client_sends_it(tool: dict[str, Any]) -> None:
    """As transformers renders it: the prompt has the client's keys, in their order."""
    assert f"Tools: {json.dumps(tool)}\n" in _offer(read_chat({"messages": QUESTION, "tools": [tool]}).tools)


@pytest.mark.parametrize("keys", list(itertools.permutations(("name", "description", "parameters"))))
def test_flat_definitions_keep_the_order_of_their_keys(keys: tuple[str, ...]) -> None:
    values = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    function = {key: values[key] for key in keys}
    expected = f"Tools: {json.dumps({'type': 'function', 'function': function})}\n"
    response = responses.read_call({"input": "x", "tools": [{"type": "function", **function}]})
    assert expected in _offer(response.tools)
    renamed = {"input_schema" if key == "parameters" else key: value for key, value in function.items()}
    message = anthropic.read_call({"messages": QUESTION, "tools": [renamed]})
    assert expected in _offer(message.tools)


@pytest.mark.parametrize("keys", list(itertools.permutations(("type", "description", "enum"))))
def test_parameters_that_a_template_needs_come_after_those_of_the_client(keys: tuple[str, ...]) -> None:
    values = {"type": "string", "description": "Unit.", "enum": ["m"]}
    unit = {key: values[key] for key in keys}
    function = {"name": "look", "parameters": {"properties": {"unit": unit, "note": {}}, "type": "object"}}
    types = (
        "{% for tool in tools or [] %}{% for each in tool.function.parameters.properties.values() %}"
        "{{ '' + each.type }}{% endfor %}{% endfor %}"
    )
    text = _offer(read_tools([{"type": "function", "function": function}]), types + _TEMPLATE)
    note = {"type": "string", "description": ""}
    parameters = {
        "properties": {"unit": unit, "note": note},
        "type": "object",
        "additionalProperties": {"type": "string"},
    }
    made = {"name": "look", "parameters": parameters, "description": ""}
    assert f"Tools: {json.dumps({'type': 'function', 'function': made})}\n" in text


def _offer(use: ToolUse | None, source: str = _TEMPLATE) -> str:
    """Return the prompt of a conversation with tools."""
    assert use is not None
    template = ChatTemplate({"default": source})
    return template.render(QUESTION, **TemplateRules(template, offers_tools=True).tool_variables(use.definitions))


def test_a_forced_tool_has_to_be_honoured(answerer: Answerer) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    with pytest.raises(UsageError, match=r"odd.*uniqueItems"):
        _answer(answerer, ToolUse([odd], "required"))
    answer, _ = _answer(answerer, ToolUse([odd, CLOCK]), max_tokens=3)
    assert list(answer.unchecked_tools) == ["odd"]
    assert "uniqueItems" in answer.unchecked_tools["odd"]


class _Pieces:
    """A detokenizer whose tokens are texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def add(self, token_id: int) -> str:
        return self._texts[token_id]

    def finish(self, *, cut: bool = False) -> str:  # noqa: ARG002
        return ""


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|channel|>", "commentary to=functions.time ", "json", "<|message|>", "{}"],
        ["<|start|>", "assistant to=functions.time", "<|channel|>", "commentary json", "<|message|>", "{}"],
    ],
)
def test_harmony_writes_the_recipient(pieces: list[str]) -> None:
    ids = {place: text for place, text in enumerate(pieces) if text.startswith("<|")}
    form = ThinkingForm(ids, "", "")
    for calls, expected in ((True, f"{CALL_BEGIN}functions.time{CALL_MESSAGE}{{}}"), (False, "<think>\n{}")):
        stream = ThinkingStream(_Pieces(pieces), form, calls=calls)
        assert "".join(stream.add(place) for place in range(len(pieces))) == expected


_HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (  # the prompt ends with `<|start|>assistant`
            [" to", "=functions.time", "<|channel|>", "commentary json", "<|message|>", "{}"],
            f"{CALL_BEGIN}functions.time{CALL_MESSAGE}{{}}",
        ),
        (
            ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", "assistant to=functions.time",
             "<|channel|>", "commentary json", "<|message|>", "{}"],
            f"<think>\nHm.\n</think>\n\n{CALL_BEGIN}functions.time{CALL_MESSAGE}{{}}",
        ),
        (["<|channel|>", "commentary", "<|message|>", "I look."], "I look."),
        ([" to", " do"], " to do"),
        (["t", "<|channel|>", "final", "<|message|>", "x"], "tx"),
        ([" "], " "),
    ],
)  # fmt: skip
def test_a_harmony_answer_may_begin_with_its_recipient(pieces: list[str], expected: str) -> None:
    ids = {place: text for place, text in enumerate(pieces) if text in _HARMONY}
    form = ThinkingForm(ids | {1000 + n: text for n, text in enumerate(_HARMONY)}, "", "")
    stream = ThinkingStream(_Pieces(pieces), form, calls=True)
    assert "".join([*(stream.add(place) for place in range(len(pieces))), stream.finish()]) == expected
