"""Bodies of Anthropic's messages as calls, events as events and messages; no HTTP."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.app.answer.call import Call
from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.events import Delta, Done, Prefill
from headrace.app.server.anthropic import MessageForm, read_call
from headrace.app.server.errors import ApiError, api_error
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.engine.request import Finished
from tests.support.deltas import delta
from tests.support.summaries import make_summary

HELLO = [{"role": "user", "content": "hello"}]


def call(**fields: Any) -> Call:
    return read_call({"model": "tiny", "max_tokens": 9, "messages": HELLO, **fields})


def events(stream: bytes) -> list[Any]:
    found = []
    for part in stream.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def test_fields_of_an_anthropic_request_become_options() -> None:
    given = call(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1234;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        stop_sequences=["x"], temperature=0.5, top_k=3, top_p=0.9, stream=True, metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 64}, output_config={"effort": "max"},
    )  # fmt: skip
    options = AnswerOptions(max_tokens=9, stop=("x",), temperature=0.5, top_k=3, top_p=0.9)
    assert (given.options, given.budget, given.effort, given.stream) == (options, 64, "max", True)
    assert given.messages == [{"role": "system", "content": "Be brief."}, *HELLO]


def test_the_billing_header_does_not_change_the_prompt() -> None:
    systems = [[{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"}] for n in (1, 2)]
    assert call(system=systems[0]) == call(system=systems[1])


def test_contents_of_every_form_become_messages() -> None:
    given = call(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "d"},
                ],
            },
            {"role": "user", "content": "e"},
            {"role": "system", "content": "f"},
            {"role": "assistant", "content": "g "},
        ]
    )
    assert given.messages == [
        {"role": "user", "content": "a\n\nb\n\nc"},
        {"role": "assistant", "content": "d", "reasoning_content": "t"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]
    assert given.continue_text == "g"


TOOL = {"name": "count", "description": "Counts.", "input_schema": {"type": "object", "properties": {}}}


def test_tools_with_their_calls_and_results_become_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "count", "input": {"n": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "two"}],
        "is_error": True,
    }
    given = call(
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[
            *HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, use]},
            {"role": "user", "content": [{"type": "text", "text": "go on"}, result]},
        ],
    )
    assert given.tools is not None
    assert (list(given.tools.tools), given.tools.choice, given.tools.parallel) == (["count"], "required", False)
    made = {"id": "t1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
    assert given.messages[1:] == [
        {"role": "assistant", "content": "so", "tool_calls": [made]},
        {"role": "tool", "content": "error: two", "tool_call_id": "t1", "name": "count"},
        {"role": "user", "content": "go on"},
    ]
    assert given.continue_text == ""


def _called(**fields: object) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "t1", "name": "count", "input": {}, **fields}
    return {"role": "assistant", "content": [use]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tools": [{"name": 5}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, _called(id=5)]}, "messages[1].content[0].id"),
        ({"messages": [*HELLO, _called(name=None)]}, "messages[1].content[0].name"),
        ({"messages": [*HELLO, _called(input=[1])]}, "messages[1].content[0].input"),
        ({"messages": [*HELLO, _called(input='{"n": 1}')]}, "messages[1].content[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"max_tokens": "many"}, "max_tokens"),
        (
            {"output_config": {"format": {"type": "json_object"}}, "schema": {"x": 1}},
            "schema excludes the schema of another field (give one of them)",
        ),
        ({"output_format": {"type": "json_object"}, "regex": "a"}, "regex excludes the schema of another field"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format of type json_schema needs a schema",
        ),
        ({"output_format": {"type": "poem"}}, "output_format must be of type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of two classes
        call(**fields)
    error = api_error(caught.value)
    assert error.status == 400
    assert named in error.message


def done(reason: Any = "stop", stop_string: str | None = None) -> Done:
    return Done(1, Finished(reason, make_summary(), stop_string=stop_string))


def test_events_and_the_message_agree() -> None:
    given = [
        Prefill(1, 0, 7, 12),
        delta(1, "<think>hm", (), thinking="hm"),
        delta(1, "</think>So", (), content="So"),
        delta(1, " it is.", (), content=" it is."),
        done(),
    ]
    streamed = MessageForm(call(stream=True), "tiny")
    sent = streamed.begin() + b"".join(streamed.take(0, event) for event in given) + streamed.end()
    found = events(sent)
    assert [one["type"] for one in found] == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [one["index"] for one in found if "index" in one] == [0, 0, 0, 1, 1, 1, 1]
    start = found[0]["message"]
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (8, 12)
    whole = MessageForm(call(), "tiny")
    for event in given:
        whole.take(0, event)
    message = whole.document()
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "So it is."},
    ]
    assert message["stop_reason"] == found[-2]["delta"]["stop_reason"] == "end_turn"
    assert message["usage"] == found[-2]["usage"]
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 20


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [(done("length"), "max_tokens", None), (done("stop", "x"), "stop_sequence", "x"), (done(), "end_turn", None)],
)
def test_ends_have_the_stop_reasons_of_anthropic(end: Done, reason: str, sequence: str | None) -> None:
    form = MessageForm(call(), "tiny")
    form.take(0, delta(1, "a", (), content="a"))
    form.take(0, end)
    assert (form.document()["stop_reason"], form.document()["stop_sequence"]) == (reason, sequence)


WHOLE = (delta(1, "", (), calls=(ToolCall("count", '{"n": 1}'),)),)
IN_PARTS = (
    delta(1, "", (), call_deltas=(CallDelta(0, "count", '{"n'),)),
    delta(1, "", (), calls=(ToolCall("count", '{"n": 1}'),), call_deltas=(CallDelta(0, "count", '": 1}'),)),
)


@pytest.mark.parametrize("made", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
def test_calls_of_tools_in_a_stream_and_a_message(made: Sequence[Delta]) -> None:
    given = [delta(1, "So: ", (), content="So: "), *made, done()]
    form = MessageForm(call(stream=True), "tiny")
    whole = MessageForm(call(), "tiny")
    found = events(b"".join(form.take(0, event) for event in given))
    (start,) = (one for one in found if one.get("content_block", {}).get("type") == "tool_use")
    deltas = [one["delta"]["partial_json"] for one in found if one.get("delta", {}).get("type") == "input_json_delta"]
    assert (start["content_block"]["name"], start["content_block"]["input"]) == ("count", {})
    assert len(deltas) == len(made)
    assert json.loads("".join(deltas)) == {"n": 1}
    assert [one["type"] for one in found[-3:]] == ["content_block_delta", "content_block_stop", "message_delta"]
    assert found[-1]["delta"]["stop_reason"] == "tool_use"
    for event in given:
        whole.take(0, event)
    text, use = whole.document()["content"]
    assert (text["text"], use["name"], use["input"]) == ("So: ", "count", {"n": 1})
    assert whole.document()["stop_reason"] == "tool_use"


def test_an_incomplete_tool_call_has_its_arguments_as_text() -> None:
    form = MessageForm(call(), "tiny")
    for event in (delta(1, "", (), calls=(ToolCall("count", '{"n": 1'),)), done("length")):
        form.take(0, event)
    document = form.document()
    assert document["stop_reason"] == "max_tokens"
    assert document["content"][0]["input"] == {"arguments": '{"n": 1'}


def test_an_error_is_an_event() -> None:
    (error,) = events(MessageForm(call(), "tiny").failed(ApiError(429, "full")))
    assert error["error"] == {"type": "rate_limit_error", "message": "full"}
