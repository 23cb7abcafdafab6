"""Bodies of chat completions as calls, events as chunks and documents; no HTTP."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.app.answer.call import Call
from headrace.app.answer.openai_form import read_chat, read_completion
from headrace.app.answer.options import AnswerOptions
from headrace.app.answer.token_reports import chat_logprobs, text_logprobs
from headrace.app.engine.events import Done, Prefill
from headrace.app.server import responses
from headrace.app.server.errors import ApiError, api_error
from headrace.app.server.openai import ChatForm
from headrace.app.server.respond import commands
from headrace.models.text.events import TokenReport
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.config.value_types import Number
from headrace.runtime.engine.request import Finished
from tests.support.deltas import delta
from tests.support.scripted_engine import record
from tests.support.summaries import make_summary

HELLO = [{"role": "user", "content": "hello"}]


def call(**fields: Any) -> Call:
    return read_chat({"model": "tiny", "messages": HELLO, **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of two classes
        call(**fields)
    error = api_error(caught.value)
    assert error.status == 400
    assert "\n" not in error.message
    return error


def chunks(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts[-1] == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1] if part != "data: [DONE]"]


def test_a_number_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    read = Number.read

    def counted(kind: Number, value: object) -> float:
        reads.append(value)
        return read(kind, value)

    monkeypatch.setattr(Number, "read", counted)
    card: Any = SimpleNamespace(thinks=False, thinking_levels=False)
    [command] = commands(call(temperature=0.5), [1], card, AnswerOptions(top_p=0.9))
    command.options.resolved(AnswerOptions(min_p=0.1)).sampling_params()
    assert reads == [0.5]


def test_fields_of_a_chat_request_become_options() -> None:
    given = call(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, stop="x", presence_penalty=1, frequency_penalty=2,
        logit_bias={"5": -100}, max_completion_tokens=9, n=3, stream=True, stream_options={"include_usage": True},
        logprobs=True, top_logprobs=2, reasoning_effort="low", user="me", metadata={"a": "b"}, unheard_of=1,
    )  # fmt: skip
    assert given.options == AnswerOptions(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, stop=("x",), presence_penalty=1, frequency_penalty=2,
        logit_bias={5: -100}, max_tokens=9,
    )  # fmt: skip
    assert (given.count, given.stream, given.include_usage, given.logprobs, given.effort) == (3, True, True, 2, "low")


def test_an_answer_without_a_limit_may_fill_the_context() -> None:
    card: Any = SimpleNamespace(thinks=False, thinking_levels=False)
    for request in (call(), read_completion({"model": "tiny", "prompt": "hello"})):
        [unlimited] = commands(request, [1], card, AnswerOptions())
        assert unlimited.options.max_tokens is None
        [limited] = commands(request, [1], card, AnswerOptions(max_tokens=7))
        assert limited.options.max_tokens == 7, "the settings file has a limit"


@pytest.mark.parametrize("fields", [{"max_tokens": -1, "seed": -1}, {"max_tokens": None, "temperature": None}])
def test_fields_of_minus_one_or_null_count_as_unset(fields: dict[str, Any]) -> None:
    assert call(**fields).options == AnswerOptions()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"functions": [{}]}, "functions"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"guided_json": {"x": 1}}, "guided_json"),
        ({"structured_outputs": {"choice": "x"}}, "choice"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "schema": {"type": "array"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": {"x": 1}}}, "response_format"),
        ({"structured_outputs": {"json": {"x": 1}, "regex": "a"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"x": 1}}, "schema": {"x": 2}}, "structured_outputs.json"),
        ({"logit_bias": []}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e99}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"best_of": 2}, "best_of"),
        ({"thinking": {"type": "perhaps"}}, "type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"repetition_penalty": 1.5, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["x", "x" * 1001]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    error = refusal(**fields)
    assert named in error.message
    assert error.param is not None
    assert error.param.startswith(named)


def test_fields_that_exclude_each_other_have_a_hint() -> None:
    error = refusal(structured_outputs={"json": {"x": 1}}, regex="a")
    assert error.message == "structured_outputs.json excludes regex (give one of them)"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": 1}}}},
            {"schema": {"x": 1}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": {"x": 1}}}, {"schema": {"x": 1}}),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, {"regex": r"a\.b|c"}),
        ({"schema": {"x": 1}}, {"schema": {"x": 1}}),
    ],
)
def test_structured_output_in_any_form_becomes_an_option(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert call(**fields).options == AnswerOptions.read(options)


def test_contents_of_every_form_become_messages() -> None:
    given = call(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"role": "assistant", "content": "e", "reasoning_content": "f", "refusal": None, "tool_calls": []},
            {"role": "user", "content": "g", "name": "me"},
        ]
    )
    assert given.messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "e", "reasoning_content": "f"},
        {"role": "user", "content": "g"},
    ]


FUNCTION = {"name": "count", "description": "Counts.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
OTHER_TOOL = {"type": "function", "function": {"name": "other"}}


def test_tools_with_their_calls_and_results_become_messages() -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
    given = call(
        tools=TOOLS, tool_choice={"type": "function", "function": {"name": "count"}}, parallel_tool_calls=False,
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "two"}]},
        ],
    )  # fmt: skip
    assert given.tools is not None
    assert (given.tools.definitions, given.tools.choice, given.tools.parallel) == (TOOLS, "count", False)
    assert given.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "two", "tool_call_id": "c1", "name": "count"},
    ]
    assert call(tools=[], tool_choice="auto").tools is None


def test_allowed_tools_are_the_only_ones() -> None:
    """Both of OpenAI's forms: of chat completions, of the Responses API."""
    for mode in ("auto", "required"):
        chosen = {"mode": mode, "tools": [{"type": "function", "function": {"name": "count"}}]}
        use = call(tools=[*TOOLS, OTHER_TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": chosen}).tools
        assert use is not None
        assert (list(use.tools), use.choice) == (["count"], mode)
    flat = [{"type": "function", **FUNCTION}, {"type": "function", "name": "other"}]
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    use = responses.read_call({"input": "hello", "tools": flat, "tool_choice": chosen}).tools
    assert use is not None
    assert list(use.tools) == ["other"]


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "missing"}}]},
        {"mode": "perhaps", "tools": [{"type": "function", "function": {"name": "count"}}]},
        {"mode": "required", "tools": []},
        {"mode": "auto", "tools": ["count"]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": ["count"]}}]},
        {"mode": "auto", "tools": {}},
        [],
    ],
)
def test_other_allowed_tools_are_refused(allowed: Any) -> None:
    refusal(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "c1"}]}]}, "function"),
    ],
)
def test_tools_that_are_none_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(**fields).message


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "So"}]
    given = call(messages=begun, continue_final_message=True)
    assert (len(given.messages), given.continue_text) == (len(HELLO), "So")
    assert call(messages=begun).continue_text == ""
    assert refusal(messages=HELLO, continue_final_message=True).param == "continue_final_message"


def test_arguments_of_calls_come_in_parts() -> None:
    calls = (ToolCall("count", '{"n": 1}'), ToolCall("count", "{}"))
    first = delta(1, "", (), call_deltas=(CallDelta(0, "count", '{"n'),))
    rest = delta(1, "", (), calls=calls, call_deltas=(CallDelta(0, "count", '": 1}'), CallDelta(1, "count", "{}")))
    parted = form(stream=True, tools=TOOLS)
    found = [one["choices"][0]["delta"] for one in chunks(parted.take(0, first) + parted.take(0, rest))]
    made = [call for delta in found for call in delta["tool_calls"]]
    assert [(call["index"], "id" in call, call["function"].get("name")) for call in made] == [
        (0, True, "count"), (0, False, None), (1, True, "count"),
    ]  # fmt: skip
    assert [call["function"]["arguments"] for call in made] == ['{"n', '": 1}', "{}"]


def test_calls_of_tools_in_a_stream_and_a_document() -> None:
    calls = (ToolCall("count", '{"n": 1}'), ToolCall("count", "{}"))
    events = [
        delta(1, "So: ", (), content="So: "),
        delta(1, "", (), calls=calls[:1]),
        delta(1, "", (), calls=calls[1:]),
    ]
    streamed = form(stream=True, tools=TOOLS)
    whole = form(tools=TOOLS)
    sent = b"".join(streamed.take(0, event) for event in [*events, done()])
    deltas = [one["choices"][0] for one in chunks(sent)]
    made = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert [(call["index"], call["type"], call["function"]["arguments"]) for call in made] == [
        (0, "function", '{"n": 1}'),
        (1, "function", "{}"),
    ]
    assert len({call["id"] for call in made}) == 2
    assert deltas[-1]["finish_reason"] == "tool_calls"
    for event in [*events, done()]:
        whole.take(0, event)
    (choice,) = whole.document()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So: "
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [call["function"] for call in made]
    cut = form(tools=TOOLS)
    cut.take(0, events[1])
    cut.take(0, delta(1, "", (), calls=(ToolCall("count", '{"n'),)))
    cut.take(0, done("length"))
    (choice,) = cut.document()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][1]["function"]["arguments"] == '{"n'


def form(**fields: Any) -> ChatForm:
    return ChatForm(call(**fields), "tiny")


def done(reason: Any = "stop", **more: Any) -> Done:
    return Done(1, Finished(reason, make_summary(), **more))


def test_chunks_join_to_the_document() -> None:
    events = [
        Prefill(1, 5, 10, 2),
        delta(1, "<think>\nhm", (), thinking="hm"),
        delta(1, "</think>\n\nSo", (), content="So"),
        delta(1, " it is.", (), content=" it is."),
        done(seed=4, thinking_tokens=2),
    ]
    streamed = form(stream=True, stream_options={"include_usage": True})
    sent = streamed.begin() + b"".join(streamed.take(0, event) for event in events) + streamed.end()
    assert sent.endswith(b"data: [DONE]\n\n")
    found = chunks(sent)
    assert len({(one["id"], one["object"], one["created"], one["model"]) for one in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"
    deltas = [one["choices"][0]["delta"] for one in found if one["choices"]]
    assert deltas[0]["role"] == "assistant"
    reasons = [one["choices"][0]["finish_reason"] for one in found if one["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert [one["usage"] for one in found[:-1]] == [None] * (len(found) - 1)
    whole = form()
    for event in events:
        whole.take(0, event)
    document = whole.document()
    (choice,) = document["choices"]
    assert choice["message"]["content"] == "So it is." == "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert choice["message"]["reasoning_content"] == "hm" == reasoning
    assert (choice["finish_reason"], choice["seed"]) == ("stop", 4)
    assert document["usage"] == found[-1]["usage"]
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert document["usage"]["total_tokens"] == 27
    assert document["usage"]["timings"]["ttft_s"] == 0.05


def test_the_texts_and_finish_reasons_of_choices_are_separate() -> None:
    two = form(n=2)
    for choice, text in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
        two.take(choice, delta(choice, text, (), content=text))
    two.take(1, done("length"))
    two.take(0, done())
    document = two.document()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["ab", "xy"]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]
    assert document["usage"]["completion_tokens"] == 14
    assert document["usage"]["prompt_tokens"] == 20


def test_log_probabilities_are_in_chunks_and_the_document() -> None:
    top = [("é", -0.5), ("\ufffd", -2.0), ("\ufffd", -3.0)]
    tokens = [TokenReport("é", -0.5, top, top_data=[None, None, b"\xc3"])]
    one = form(logprobs=True, top_logprobs=2)
    (chunk,) = chunks(one.take(0, delta(1, "", [record(0, 9)], reports=tokens)))  # its text is held back
    (report,) = chunk["choices"][0]["logprobs"]["content"]
    assert (report["token"], report["logprob"], report["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert report["top_logprobs"][1:] == [
        {"token": "\ufffd", "logprob": -2.0, "bytes": None},
        {"token": "\ufffd", "logprob": -3.0, "bytes": [0xC3]},
    ]
    one.take(0, done())
    assert one.document()["choices"][0]["logprobs"]["content"] == [report]


def test_a_log_probability_of_minus_infinity_is_a_number() -> None:
    impossible = TokenReport("a", -math.inf, [("b", 0.0), ("a", -math.inf)])
    (report,) = chat_logprobs([impossible])["content"]
    assert [report["logprob"], report["top_logprobs"][1]["logprob"]] == [-9999.0, -9999.0]
    text = text_logprobs([impossible])
    assert text["token_logprobs"] == [-9999.0]
    assert text["top_logprobs"] == [{"b": 0.0, "a": -9999.0}]


def test_an_error_in_a_stream_is_an_object() -> None:
    sent = form(stream=True).failed(ApiError(500, "it broke", "engine_died"))
    (chunk,) = chunks(sent)
    assert chunk["error"] == {"message": "it broke", "type": "server_error", "param": None, "code": "engine_died"}
    assert sent.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"best_of": 1, "typical_p": 1, "tfs_z": 1.0, "length_penalty": 1, "top_n_sigma": -1, "mirostat": 0}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1e-6}),
        ({"seed": -5, "max_tokens": -1}, {}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 5}),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, {"chat_template_kwargs": {"preserve_thinking": True}}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}},
            {"schema": {"type": "object", "required": ["a"]}},
        ),
    ],
)
def test_values_without_effect_that_clients_send_are_accepted(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert call(**fields).options.given() == options


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({}, None),
    ],
)
def test_thinking_is_switched_by_every_clients_field(fields: dict[str, Any], budget: bool | None) -> None:
    assert call(**fields).budget is budget


@pytest.mark.parametrize(
    ("choice", "read"), [("any", "required"), ({"type": "auto"}, "auto"), ({"type": "any"}, "required")]
)
def test_tool_choice_is_read_in_the_words_of_other_clients(choice: Any, read: str) -> None:
    use = call(tools=TOOLS, tool_choice=choice).tools
    assert use is not None
    assert use.choice == read


def test_tools_of_the_responses_form_are_taken() -> None:
    use = call(tools=[{"type": "function", "name": "flat", "parameters": {"type": "object"}}]).tools
    assert use is not None
    assert use.definitions == [{"type": "function", "function": {"name": "flat", "parameters": {"type": "object"}}}]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_images_of_earlier_messages_are_replaced_by_a_note() -> None:
    """An agent that has seen a screenshot goes on; an image in the newest question is refused."""
    seen = {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}
    given = call(messages=[seen, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}])
    assert given.messages[0]["content"] == "look\n[image: not shown, this model reads text]"
    result = {"role": "tool", "tool_call_id": "c1", "content": [IMAGE]}
    made = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "count"}}]}
    given = call(messages=[*HELLO, made, result])
    assert given.messages[-1]["content"].startswith("[image")
    assert "image_url" in refusal(messages=[seen]).message


CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": {"type": "text"}}}


def test_a_custom_tool_is_called_with_one_text() -> None:
    given = call(tools=[CUSTOM], tool_choice={"type": "custom", "custom": {"name": "patch"}}, stream=True)
    assert given.tools is not None
    assert given.tools.choice == "patch"
    whole = form(tools=[CUSTOM])
    streamed = form(tools=[CUSTOM], stream=True)
    whole_call = ToolCall("patch", '{"input": "a\\nb"}')
    events = [
        delta(1, "", (), call_deltas=(CallDelta(0, "patch", '{"input": "a'),)),
        delta(1, "", (), calls=(whole_call,), call_deltas=(CallDelta(0, "patch", '\\nb"}'),)),
        done(),
    ]
    sent = b"".join(streamed.take(0, event) for event in events)
    deltas = [one["choices"][0]["delta"]["tool_calls"][0] for one in chunks(sent) if one["choices"][0]["delta"]]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert [delta["custom"] for delta in deltas[1:]] == [{"input": "a\nb"}]
    for event in events:
        whole.take(0, event)
    (made,) = whole.document()["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "a\nb"})
    back = call(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [made]}], tools=[CUSTOM])
    assert back.messages[-1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "a\\nb"}'}
