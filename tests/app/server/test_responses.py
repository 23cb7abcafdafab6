"""Bodies of the Responses API as calls, events as events and responses; no HTTP."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.app.answer.call import Call
from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.events import Delta, Done
from headrace.app.server.errors import ApiError, api_error
from headrace.app.server.responses import ResponseForm, read_call
from headrace.models.text.events import TokenReport
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import UsageError
from tests.support.deltas import delta
from tests.support.scripted_engine import record
from tests.support.summaries import make_summary


def done(reason: Any = "stop") -> Done:
    return Done(1, Finished(reason, make_summary(), thinking_tokens=2))


def call(**fields: Any) -> Call:
    return read_call({"model": "tiny", "input": "hello", **fields})


def events(stream: bytes) -> list[Any]:
    found = []
    for part in stream.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_fields_of_a_response_request_become_options() -> None:
    given = call(
        instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9, stream=True, store=False,
        reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"], prompt_cache_key="k",
        tools=[{"type": "web_search"}, {"type": "local_shell"}], tool_choice="auto", text={"verbosity": "low"},
    )  # fmt: skip
    assert given.options == AnswerOptions(max_tokens=9, temperature=0.5, top_p=0.9)
    assert (given.effort, given.stream) == ("low", True)
    assert given.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def test_log_probabilities_are_those_of_the_content() -> None:
    given = call(include=["message.output_text.logprobs"], top_logprobs=1)
    assert (given.logprobs, call().logprobs) == (1, None)
    with pytest.raises(UsageError, match="include"):
        call(top_logprobs=1)
    form = ResponseForm(given, "tiny")
    first = TokenReport("a", -0.5, [("a", -0.5)])
    second = TokenReport("b", -1.0, [("c", -0.1)])
    streamed = form.take(0, delta(1, "", [record(0, 9)], reports=[first]))  # its text is held back
    streamed += form.take(0, delta(1, "ab", [record(1, 9)], content="ab", reports=[second]))
    streamed += form.take(0, done())
    (message,) = form.document()["output"]  # type: ignore[misc]
    reports = message["content"][0]["logprobs"]
    assert [report["token"] for report in reports] == ["a", "b"]
    sent = [json.loads(line[6:]) for line in streamed.decode().split("\n") if line.startswith("data: ")]
    assert [each["logprobs"] for each in sent if each["type"] == "response.output_text.delta"] == [reports]


def test_input_items_of_every_form_become_messages() -> None:
    given = call(
        instructions="a",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "?"},
            {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
        ],
    )
    assert given.messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm"},
        {"role": "user", "content": "e"},
    ]


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


_CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
_MADE = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            [_said("a"), _thought("b"), _said("c")],
            [{"content": "a"}, {"content": "c", "reasoning_content": "b"}],
        ),
        (
            [_thought("a"), _said("b"), _thought("c"), _CALL],
            [
                {"content": "b", "reasoning_content": "a"},
                {"content": "", "reasoning_content": "c", "tool_calls": _MADE},
            ],
        ),
        (
            [_said("a"), _thought("b"), _CALL],
            [{"content": "a"}, {"content": "", "reasoning_content": "b", "tool_calls": _MADE}],
        ),
        ([_thought("a"), _thought("b"), _said("c")], [{"content": "c", "reasoning_content": "a\n\nb"}]),
        (
            [_thought("a"), _said("b"), _CALL],
            [{"content": "b", "reasoning_content": "a", "tool_calls": _MADE}],
        ),
        ([_thought("a")], [{"content": "", "reasoning_content": "a"}]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "?"}, _said("a")], [{"content": "a"}]),
    ],
)
def test_reasoning_stays_with_the_answer_that_it_precedes(
    given: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> None:
    """It never moves to an answer before it, or to one after the user's next message."""
    question = {"role": "user", "content": "hello"}
    read = call(input=[question, *given, question, _said("later"), question]).messages
    expected = [{"role": "assistant", **message} for message in messages]
    assert read == [question, *expected, question, {"role": "assistant", "content": "later"}, question]


def test_tools_with_their_calls_and_results_become_messages() -> None:
    function = {"type": "function", "name": "count", "parameters": {"type": "object"}, "strict": False}
    given = call(
        tools=[function, {"type": "custom", "name": "patch"}, {"type": "web_search"}],
        tool_choice={"type": "function", "name": "count"},
        input=[
            {"role": "user", "content": "hello"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "count", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "count", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "two"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "three"}]},
        ],
    )
    assert given.tools is not None
    assert (list(given.tools.tools), given.tools.choice) == (["count", "patch"], "count")
    made = [{"id": i, "type": "function", "function": {"name": "count", "arguments": "{}"}} for i in ("c1", "c2")]
    assert given.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": made, "reasoning_content": "hm"},
        {"role": "tool", "content": "two", "tool_call_id": "c1", "name": "count"},
        {"role": "tool", "content": "three", "tool_call_id": "c2", "name": "count"},
    ]
    assert call(tools=[{"type": "web_search"}], tool_choice="auto").tools is None
    for choice in ("required", {"type": "web_search"}):
        with pytest.raises(UsageError, match="tool_choice"):
            call(tools=[{"type": "web_search"}], tool_choice=choice)


WHOLE = (delta(1, "", (), calls=(ToolCall("count", '{"n": 1}'),)),)
IN_PARTS = (
    delta(1, "", (), call_deltas=(CallDelta(0, "count", '{"n'),)),
    delta(1, "", (), calls=(ToolCall("count", '{"n": 1}'),), call_deltas=(CallDelta(0, "count", '": 1}'),)),
)


@pytest.mark.parametrize("calls", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
def test_calls_of_tools_are_items(calls: Sequence[Delta]) -> None:
    given = [delta(1, "So: ", (), content="So: "), *calls, done()]
    form = ResponseForm(call(stream=True), "tiny")
    found = events(form.begin() + b"".join(form.take(0, event) for event in given) + form.end())
    names = [one["type"].removeprefix("response.") for one in found]
    assert names[-4 - len(calls) :] == [
        "output_item.added", *["function_call_arguments.delta"] * len(calls), "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert {one["output_index"] for one in found if "function_call" in one["type"]} == {1}
    message, made = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "So: "
    assert (made["type"], made["name"], made["arguments"], made["status"]) == (
        "function_call", "count", '{"n": 1}', "completed",
    )  # fmt: skip
    assert found[-2]["item"] == made


def test_a_truncated_tool_call_has_status_incomplete() -> None:
    form = ResponseForm(call(stream=True), "tiny")
    sent = form.begin() + b"".join(form.take(0, event) for event in (IN_PARTS[0], done("length"))) + form.end()
    (made,) = events(sent)[-1]["response"]["output"]
    assert (made["status"], made["arguments"]) == ("incomplete", '{"n')


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not stored here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{**_CALL, "arguments": {"n": 1}}]}, "input[0].arguments must be a text"),
        ({"input": [{**_CALL, "name": None}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "two"}]}, "input[0].call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c1", "name": "patch"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "s1", "action": "ls"}]}, "input[0].action"),
        ({"input": [{"type": "local_shell_call_output", "output": "two"}]}, "input[0].id"),
        ({"input": [{"type": "hologram"}]}, "items of type 'hologram' are not supported"),
        (
            {"text": {"format": {"type": "json_object"}}, "schema": {"x": 1}},
            "schema excludes the schema of another field (give one of them)",
        ),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex excludes the schema of another field"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": "low"}, "reasoning"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of two classes
        call(**fields)
    error = api_error(caught.value)
    assert error.status == 400
    assert named in error.message


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_events_and_the_response_agree(reason: str, status: str) -> None:
    given = [
        delta(1, "<think>hm", (), thinking="hm"),
        delta(1, "</think>So", (), content="So"),
        delta(1, " it is.", (), content=" it is."),
        done(reason),
    ]
    form = ResponseForm(call(stream=True), "tiny")
    found = events(form.begin() + b"".join(form.take(0, event) for event in given) + form.end())
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        status,
    ]  # fmt: skip
    response = found[-1]["response"]
    assert response["status"] == status
    assert response == form.document()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    reasoning, message = response["output"]
    assert reasoning["content"][0]["text"] == "hm"
    assert message["content"][0]["text"] == "So it is."
    items = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert items == response["output"]
    added = [one["item"] for one in found if one["type"] == "response.output_item.added"]
    assert [item["content"] for item in added] == [[], []]
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (20, 7)
    assert (response["incomplete_details"] is None) == (status == "completed")


def test_an_error_ends_as_a_failed_response() -> None:
    (failed,) = events(ResponseForm(call(), "tiny").failed(ApiError(500, "it broke", "engine_died")))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "engine_died", "message": "it broke"}


PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
SPACE = {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "look", "parameters": {}}]}


def test_a_namespace_with_an_entry_that_is_no_object_is_refused() -> None:
    with pytest.raises(UsageError, match="tools must have objects, not 5"):
        call(tools=[SPACE | {"tools": [5]}])


def test_codexs_tools_are_offered_and_called_as_they_are() -> None:
    """Functions of a namespace are returned with it, custom tools with their text."""
    given = call(tools=[PATCH, SPACE, {"type": "web_search"}])
    assert given.tools is not None
    assert list(given.tools.tools) == ["patch", "mcp__look"]
    assert "start: /x/" in given.tools.definitions[0]["function"]["description"]
    form = ResponseForm(given, "tiny")
    calls = (ToolCall("patch", '{"input": "x"}'), ToolCall("mcp__look", "{}"))
    sent = form.begin() + form.take(0, delta(1, "", (), calls=calls)) + form.take(0, done()) + form.end()
    patch, look = events(sent)[-1]["response"]["output"]
    assert (patch["type"], patch["name"], patch["input"], patch["status"]) == (
        "custom_tool_call", "patch", "x", "completed",
    )  # fmt: skip
    assert (look["type"], look["namespace"], look["name"], look["arguments"]) == ("function_call", "mcp", "look", "{}")
    assert not {"written", "arguments"} & patch.keys()
    history = call(input=[{"role": "user", "content": "go"}, patch, look], tools=[PATCH, SPACE]).messages
    made = [one["function"] for one in history[-1]["tool_calls"]]
    assert made == [{"name": "patch", "arguments": '{"input": "x"}'}, {"name": "mcp__look", "arguments": "{}"}]


def test_items_of_foreign_tools_become_messages() -> None:
    shell = {"type": "local_shell_call", "call_id": "s1", "action": {"type": "exec", "command": ["ls"]}}
    items = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        shell,
        {"type": "local_shell_call_output", "id": "s1", "output": "a.txt"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "gAAA"},
    ]
    messages = call(input=items).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["patched", "a.txt"]
    assert "shortened by another service" in messages[-1]["content"]
