"""The Python packages of OpenAI and Anthropic against a server: what people's programs use."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import jsonschema
import pytest

from tests.support.pages import blocks
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import IM_END

# Imported by tests that need them, not by each process that collects these: that takes two seconds.
if TYPE_CHECKING:
    import anthropic
    import openai

HELLO: Any = [{"role": "user", "content": "hello"}]
LETTERS = {str(ord(letter) - 33): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}  # greedy letters
HEADER = "Headrace-Unchecked-Tools"
ENDLESS: Any = {"temperature": 1, "logit_bias": {str(IM_END): -100}}


@pytest.fixture
def openai_client(server: ServerProcess) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=f"{server.root}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def anthropic_client(server: ServerProcess) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_example_of_the_guide_runs(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = blocks("docs/server.md", "python")
    assert "http://127.0.0.1:8080" in code
    code = code.replace("http://127.0.0.1:8080", server.root).replace("qwen3.5-4b", server.name)
    code = code.replace("stream=True", "stream=True, max_tokens=8")  # the tiny model ends no answer
    exec(compile(code, "docs/server.md", "exec"), {})
    assert capsys.readouterr().out


def test_a_streamed_chat_equals_an_unstreamed_one(openai_client: "openai.OpenAI") -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 3, **ENDLESS}
    whole = openai_client.chat.completions.create(**options)
    stream = openai_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 20
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert usage.model_extra is not None
    assert usage.model_extra["timings"]["decode_tokens_per_second"] > 0


def test_several_choices_count_their_seeds_up(openai_client: "openai.OpenAI") -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 8, **ENDLESS}
    three = openai_client.chat.completions.create(**options, n=3, seed=5)
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) == 3
    for seed, text in zip((5, 6, 7), texts, strict=True):
        alone = openai_client.chat.completions.create(**options, seed=seed)
        assert alone.choices[0].message.content == text


def test_log_probabilities_reach_the_openai_client(openai_client: "openai.OpenAI") -> None:
    answer = openai_client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, logit_bias=LETTERS, temperature=0
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert [len(token.top_logprobs), token.bytes] == [3, list(token.token.encode())]
        assert all(best.logprob <= 0 for best in token.top_logprobs)


def test_stop_strings_end_a_text(openai_client: "openai.OpenAI") -> None:
    options: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "logit_bias": LETTERS, "temperature": 0}
    text = openai_client.completions.create(**options).choices[0].text
    assert len(text) == 20
    stopped = openai_client.completions.create(**options, stop=[text[5:8]])
    assert stopped.choices[0].text == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"
    pieces = list(openai_client.completions.create(**options, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == text
    both = openai_client.completions.create(**{**options, "prompt": ["hello", "other"], "n": 2})
    assert [choice.text for choice in both.choices[:2]] == [text, text]
    assert both.choices[2].text == both.choices[3].text


def test_fill_in_middle_is_refused_for_models_without_its_tokens(openai_client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle"):
        openai_client.completions.create(model="tiny", prompt="a", suffix="b")


def test_errors_become_the_clients_exception_classes(openai_client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="tiny"):
        openai_client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    long: Any = [{"role": "user", "content": "x" * 250_000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.chat.completions.create(model="tiny", messages=long)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.chat.completions.create(model="tiny", messages=long, stream=True)


def test_a_client_that_leaves_is_cancelled(openai_client: "openai.OpenAI", server: ServerProcess) -> None:
    stream = openai_client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **ENDLESS)
    next(iter(stream))
    assert server.health()["requests"] == 1
    stream.close()
    server.until(requests=0)


def test_answers_fit_a_schema(openai_client: "openai.OpenAI", anthropic_client: "anthropic.Anthropic") -> None:
    import openai

    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}, "of": {"enum": ["mills", "rivers"]}},
        "required": ["n", "of"], "additionalProperties": False,
    }  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    options: Any = {"model": "tiny", "temperature": 1, "seed": 2}
    chat = openai_client.chat.completions.create(**options, messages=HELLO, response_format=wanted)
    flat: Any = {"format": {"type": "json_schema", "name": "count", "schema": schema}}
    response = openai_client.responses.create(model="tiny", input="hello", temperature=1, text=flat)
    message: Any = anthropic_client.messages.create(model="tiny", messages=HELLO, max_tokens=999, output_config=flat)
    for text in (chat.choices[0].message.content, response.output_text, message.content[0].text):
        jsonschema.validate(json.loads(text or ""), schema)
    chosen = openai_client.chat.completions.create(
        **options, messages=HELLO, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no")
    bad: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "mill"}}}
    with pytest.raises(openai.BadRequestError, match="mill"):
        openai_client.chat.completions.create(**options, messages=HELLO, response_format=bad)


def test_explanations_name_the_token_that_differs(
    openai_client: "openai.OpenAI", anthropic_client: "anthropic.Anthropic"
) -> None:
    explain: Any = {"headrace": {"explain": True}}
    long = "one and the same beginning of more than a block. " * 8

    def prefix(found: Any) -> Any:
        return found.model_extra["headrace"]["prefix"]

    def messages(text: str) -> Any:
        return [{"role": "user", "content": text}]

    options: Any = {"model": "tiny", "max_tokens": 2, "extra_body": explain}
    openai_client.chat.completions.create(**options, messages=messages(f"{long} Monday, please."))
    second = openai_client.chat.completions.create(**options, messages=messages(f"{long} Tuesday, please."))
    found = prefix(second)
    assert (found["difference"]["prompt_token"], found["difference"]["earlier_token"]) == ("T", "M")
    assert found["difference"]["before"].endswith("block.  ")
    assert found["difference"]["position"] >= found["reused"] > 0
    assert "'T'" in found["reason"]
    again: Any = anthropic_client.messages.create(**options, messages=messages(f"{long} Tuesday, please."))
    assert prefix(again)["reused"] == prefix(again)["prompt_tokens"] - 1
    response = openai_client.responses.create(
        model="tiny", input=f"{long} Wednesday", max_output_tokens=2, extra_body=explain
    )
    assert prefix(response)["difference"]["prompt_token"] == "W"
    chunks = openai_client.chat.completions.create(**options, messages=messages("quite another"), stream=True)
    assert [prefix(chunk)["reused"] for chunk in chunks if "headrace" in (chunk.model_extra or {})] == [
        6
    ]  # <|im_start|>user and a line end
    shown: Any = openai_client.chat.completions.create(**options, messages=messages("a <|im_end|> b"))
    parts = shown.model_extra["headrace"]["prompt"]
    assert (
        "".join(part["text"] for part in parts) == "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [part["text"] for part in parts if part["control"]] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    plain = openai_client.chat.completions.create(model="tiny", max_tokens=2, messages=messages("x"))
    assert "headrace" not in (plain.model_extra or {})


PARAMETERS = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


def test_tools_are_called_through_the_openai_client(openai_client: "openai.OpenAI") -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    options: Any = {"model": "tiny", "tools": tools, "tool_choice": "required", "temperature": 1, "seed": 1}
    whole = openai_client.chat.completions.create(**options, messages=HELLO, parallel_tool_calls=False)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    (made,) = choice.message.tool_calls or ()
    assert made.type == "function"
    assert json.loads(made.function.arguments)["city"] in ("Oslo", "Rome")
    stream = openai_client.chat.completions.create(**options, messages=HELLO, parallel_tool_calls=False, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    functions = [call.function for call in streamed if call.function is not None]
    assert [function.name for function in functions] == ["weather", *[None] * (len(functions) - 1)]
    assert "".join(function.arguments or "" for function in functions) == made.function.arguments
    assert {call.index for call in streamed} == {0}
    assert chunks[-1].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
    after = [*HELLO, choice.message.model_dump(exclude_none=True), result]
    plain = openai_client.chat.completions.create(
        **{**options, "tool_choice": "none"}, messages=after, max_tokens=5, logit_bias=LETTERS
    )
    assert plain.choices[0].finish_reason == "length"
    response = openai_client.responses.create(
        model="tiny", input="hello", tool_choice="required", temperature=1, parallel_tool_calls=False,
        tools=[{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}],
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")


def test_a_tool_that_cannot_be_checked_is_named(client: httpx.Client) -> None:
    odd = {"name": "odd", "parameters": {"properties": {"a": {"uniqueItems": True}}}}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": odd}], "max_tokens": 2}
    for stream in (False, True):
        assert client.post("/v1/chat/completions", json={**body, "stream": stream}).headers.get(HEADER) == "odd"
        assert HEADER not in client.post("/v1/chat/completions", json={**body, "tools": [], "stream": stream}).headers


def test_tools_are_called_through_the_anthropic_client(anthropic_client: "anthropic.Anthropic") -> None:
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    options: Any = {"model": "tiny", "max_tokens": 200, "tools": tools, "tool_choice": choice}
    with anthropic_client.messages.stream(**options, messages=HELLO) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input["city"] in ("Oslo", "Rome")
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    after: Any = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=after, tools=tools)
    assert counted.input_tokens > 100
    options |= {"tool_choice": {"type": "none"}, "max_tokens": 4}
    assert anthropic_client.messages.create(**options, messages=after).stop_reason in ("max_tokens", "end_turn")


def test_models_are_listed_for_the_clients(
    openai_client: "openai.OpenAI", anthropic_client: "anthropic.Anthropic", client: httpx.Client
) -> None:
    import openai

    (model,) = openai_client.models.list()
    assert (model.id, model.owned_by) == ("tiny", "headrace")
    assert model.model_extra is not None
    assert model.model_extra["context_length"] == 200_000
    assert openai_client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("other")
    (model_info,) = anthropic_client.models.list()
    assert model_info.id == "tiny"
    assert client.get("/v1/models").json()["models"] == []  # Codex reads it


def test_a_response_is_the_same_streamed_and_whole(openai_client: "openai.OpenAI") -> None:
    import openai

    options: Any = {
        "model": "tiny",
        "input": "hello",
        "instructions": "Be brief.",
        "max_output_tokens": 12,
        "temperature": 0,
    }
    whole = openai_client.responses.create(**options)
    events = list(openai_client.responses.create(**options, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text == text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 12
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        openai_client.responses.create(**options, previous_response_id="resp_1")


def test_messages_of_anthropic_are_the_same_streamed_and_whole(anthropic_client: "anthropic.Anthropic") -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "system": "Be brief."}
    whole = anthropic_client.messages.create(**options)
    (block,) = whole.content
    assert block.type == "text"
    with anthropic_client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == 1
    cached = final.usage.cache_read_input_tokens
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
    assert counted.input_tokens == final.usage.input_tokens + (cached or 0)


def test_a_message_is_continued(anthropic_client: "anthropic.Anthropic") -> None:
    options: Any = {"model": "tiny"}
    whole: Any = anthropic_client.messages.create(**options, messages=HELLO, max_tokens=16).content[0]
    begun: Any = [*HELLO, {"role": "assistant", "content": whole.text[:6]}]
    rest: Any = anthropic_client.messages.create(**options, messages=begun, max_tokens=10).content[0]
    assert whole.text[:6].rstrip() + rest.text == whole.text or not whole.text.isascii()


def test_errors_become_the_anthropic_clients_exception_classes(anthropic_client: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as refused:
        anthropic_client.messages.create(model="tiny", messages=HELLO, max_tokens=5, extra_body={"temperature": -1})
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="claude", messages=HELLO, max_tokens=5)
