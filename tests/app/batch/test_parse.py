"""Batch lines: accepted forms, and errors by key for one line alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.answer.openai_form import read_chat, read_completion
from headrace.app.answer.options import AnswerOptions
from headrace.app.batch.parse import BadLine, BatchDefaults, BatchLine, parse_line, parse_lines

DEFAULTS = BatchDefaults(options=AnswerOptions(temperature=0.5, max_tokens=9), model="tiny", names=frozenset({"tiny"}))


def parsed(line: object, defaults: BatchDefaults = DEFAULTS, number: int = 1) -> BatchLine:
    found = parse_line(json.dumps(line).encode(), number, defaults)
    assert isinstance(found, BatchLine), found.error
    return found


def refused(line: object, defaults: BatchDefaults = DEFAULTS) -> str:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    found = parse_line(raw, 3, defaults)
    assert isinstance(found, BadLine), found
    return str(found.error)


def body(**changes: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **changes}
    return {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": asked}


def test_a_prompt_is_a_message_and_its_options_go_before_those_of_all_lines() -> None:
    line = parsed({"prompt": "hi", "temperature": 1, "stop": "x", "id": 7})
    assert line.prompt == [{"role": "user", "content": "hi"}]
    assert line.options.given() == {"temperature": 1.0, "max_tokens": 9, "stop": ("x",)}
    assert (line.name, line.form, line.number) == (7, "plain", 1)


def test_a_system_message_of_all_lines_goes_where_there_is_none() -> None:
    defaults = BatchDefaults(system="short")
    system = {"role": "system", "content": "short"}
    own = {"role": "system", "content": "long"}
    asked = {"role": "user", "content": "hi"}
    assert parsed({"prompt": "hi"}, defaults).prompt == [system, asked]
    assert parsed({"messages": [asked]}, defaults).prompt == [system, asked]
    assert parsed({"messages": [own, asked]}, defaults).prompt == [own, asked]
    assert parsed({"prompt": "hi", "system": "long"}, defaults).prompt == [own, asked]
    assert parsed({"prompt": "hi", "system": ""}, defaults).prompt == [asked]
    assert parsed(body(model=None), defaults).prompt == [system, asked]


@pytest.mark.parametrize("role", [["user"], {"a": 1}, 3, None, "model"])
def test_unknown_roles_are_refused(role: Any) -> None:
    assert "role" in refused({"messages": [{"role": role, "content": "x"}]})


def test_an_unknown_url_is_refused_under_the_lines_custom_id() -> None:
    found = parse_line(json.dumps({**body(), "url": "/v1/embeddings"}).encode(), 3, DEFAULTS)
    assert (found.name, found.form) == ("q", "chat.completion")


def test_raw_prompts_are_not_wrapped_in_messages() -> None:
    assert parsed({"prompt": "Once", "raw": True}).prompt == "Once"
    assert parsed({"prompt": "Once"}, BatchDefaults(raw=True)).prompt == "Once"
    assert parsed({"prompt": "Once", "raw": False}, BatchDefaults(raw=True)).prompt != "Once"
    line = parsed({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Once"}})
    assert (line.prompt, line.form) == ("Once", "text_completion")


def test_the_openai_form_is_the_same_request_by_other_names() -> None:
    line = parsed(
        body(max_completion_tokens=5, top_p=0.5, logit_bias={"3": -1}, n=1, stream=False, user="me", seed=None)
    )
    assert parsed(body(tools=[], store=True, top_logprobs=0)).options.given() == DEFAULTS.options.given()
    assert line.options.given() == {"temperature": 0.5, "max_tokens": 5, "top_p": 0.5, "logit_bias": {3: -1.0}}
    assert (line.form, line.name) == ("chat.completion", "q")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parsed(body(messages=[{"role": "user", "content": parts}])).prompt == [
        {"role": "user", "content": "one\ntwo"}
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"\xff{}", "byte 0"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt'"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b"[" * 100_000, "nested"),
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "temprature": 1}, "'temprature'"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "temperature": "0.7"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        ({"prompt": "a", "id": 1.5}, "id"),
        ({"prompt": "a", "speculate": "draft"}, "speculate"),
        ({"prompt": "a", "speculate": [1]}, "speculate"),
        ({"prompt": "a", "raw": 1}, "raw"),
        ({"prompt": "a", "raw": True, "system": "b"}, "raw"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0] must be an object, not 'a'"),
        ({"messages": [{"role": "user"}]}, "messages[0] needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, "system"),
        ({**body(), "priority": 1}, "'priority'"),
        ({**body(), "method": "GET"}, "method"),
        ({**body(), "url": "/v1/embeddings"}, "url"),
        ({**body(), "custom_id": None}, "custom_id"),
        ({"custom_id": "a"}, "body"),
        (body(model="gpt-4o"), "'gpt-4o'"),
        (body(tools=[{"type": "function"}]), "tools: a function's name"),
        (body(tool_choice="required"), "tool_choice needs tools"),
        (body(top_logprobs=3), "top_logprobs needs logprobs"),
        (body(logprobs=True, top_logprobs=21), "top_logprobs"),
        ({"prompt": "a", "raw": True, "tools": [{}]}, "tools"),
        ({"prompt": "a", "logprobs": True}, "'logprobs'"),
        ({"custom_id": "a", "body": {"prompt": "a", "tools": []}}, "'tools' in body"),
        (body(stream=True), "false, not true"),
        (body(response_format={"type": "x"}), "text, json_object or json_schema"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n", "raw": True}, "prompt"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ""}}, "prompt"),
        ({"messages": [{"role": None, "content": "a"}]}, "not null"),
        (body(n=2), "n "),
        (body(n=True), "n "),
        (body(stream=True), "stream"),
        (body(prompt="a"), "'prompt' in body"),
        (body(messages=None), "messages"),
        (body(response_format={"type": "json_object"}, regex="a"), "response_format"),
        ({"prompt": "a", "schema": {}, "regex": "a"}, "schema and regex exclude each other"),
        ({"prompt": "a", "schema": [1]}, "schema must be"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "thinking": True}}, "thinking"),
    ],
)
def test_invalid_lines_are_refused_by_key(line: object, said: str) -> None:
    assert said in refused(line)


def test_a_model_of_the_command_line_answers_every_line() -> None:
    assert isinstance(parse_line(json.dumps(body(model="gpt-4o")).encode(), 1, BatchDefaults(model="tiny")), BatchLine)


def test_blank_lines_are_numbered_and_repeated_ids_refused() -> None:
    lines = parse_lines([b'{"prompt": "a", "id": "x"}', b"", b'{"prompt": "a", "id": "x"}', b"nonsense\r"], DEFAULTS)
    assert [line.number for line in lines] == [1, 3, 4]
    assert [type(line) for line in lines] == [BatchLine, BadLine, BadLine]
    assert isinstance(lines[1], BadLine)
    assert "'x' is the name of line 1" in str(lines[1].error)
    assert len({line.digest for line in lines}) == 3


def test_a_digest_depends_on_the_request() -> None:
    asked = {"prompt": "hi", "temperature": 0.5}
    same = parsed(asked).digest
    assert parsed({"temperature": 0.5, "prompt": "hi"}).digest == same
    assert parsed({"prompt": "hi"}).digest == same  # 0.5 holds for all lines
    others = [
        parsed({**asked, "temperature": 0.6}),
        parsed({"prompt": "ho"}),
        parsed(asked, number=2),
        parsed({**asked, "id": 1}),
        parsed(asked, BatchDefaults(options=DEFAULTS.options, model="other")),
        parsed(asked, BatchDefaults(options=DEFAULTS.options, model="tiny", identity="elsewhere")),
        parsed({**asked, "logit_bias": {"1": 1}}),
        parsed({**asked, "raw": True}),
    ]
    assert len({same, *(line.digest for line in others)}) == len(others) + 1
    assert parsed({**asked, "id": 1}, number=2).digest == parsed({**asked, "id": 1}).digest


def test_a_custom_tool_and_a_function_with_the_same_definition_have_two_digests() -> None:
    """Their results differ: a custom tool is called with a text, a function with JSON arguments."""
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": "x", "description": "", "parameters": parameters}
    custom = parsed({"prompt": "hi", "tools": [{"type": "custom", "custom": {"name": "x"}}]})
    other = parsed({"prompt": "hi", "tools": [{"type": "function", "function": function}]})
    assert custom.call.tools == other.call.tools
    assert custom.digest != other.digest


def test_whole_numbers_of_a_settings_file_keep_their_digest() -> None:
    """An output whose lines were answered before numbers of the settings became floats can be resumed."""
    written = {"temperature": 1, "top_p": 1.0, "max_tokens": 5, "min_p": 0.05}
    defaults = BatchDefaults(options=AnswerOptions.read(written), written=written, model="tiny")
    assert parsed({"prompt": "hi"}, defaults).digest == "2b79cffaee6c036ee257a83fabce6a1a"
    assert parsed({"prompt": "hi", "temperature": 1}, defaults).digest == "f0eca74260df1900214d85bc303ff3dd"


def test_a_digest_depends_on_the_catalogs_sampling_where_it_has_an_effect() -> None:
    old = BatchDefaults(model="tiny")
    new = BatchDefaults(model="tiny", recommended={"temperature": 0.2, "top_p": 0.9})
    for asked, same in (({}, False), ({"temperature": 0}, True), ({"temperature": 1}, False)):
        line = {"prompt": "hi", **asked}
        assert (parsed(line, old).digest == parsed(line, new).digest) == same
    explicit = {"prompt": "hi", "temperature": 0.2, "top_p": 0.9}
    assert parsed(explicit, old).digest == parsed({"prompt": "hi"}, new).digest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["prompt", "messages", "system", "raw", "id", "custom_id", "body", "url", "method", "model", "role", "content", "n"]
) | st.sampled_from(["stop", "seed", "logit_bias", "temperature", "max_tokens", "thinking"])


@given(st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON, max_size=4), max_size=5))
def test_any_json_object_is_a_request_or_an_invalid_line(line: dict[str, Any]) -> None:
    found = parse_line(json.dumps(line).encode(), 1, DEFAULTS)
    assert isinstance(found, BatchLine | BadLine)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_or_an_invalid_line(raw: bytes) -> None:
    assert isinstance(parse_line(raw, 1, DEFAULTS), BatchLine | BadLine)


def test_fields_that_the_server_ignores_are_ignored() -> None:
    ignored = {"service_tier": "auto", "store": False, "verbosity": "low", "web_search_options": None, "seed": None}
    line = parsed(body(max_tokens=5, max_completion_tokens=3, reasoning_effort="minimal", **ignored))
    assert (line.options.max_tokens, line.call.effort) == (3, "minimal")


def test_a_body_is_read_as_the_server_reads_it() -> None:
    fields = {
        "top_k": -1, "seed": -1, "thinking": {"type": "disabled"}, "structured_outputs": {"choice": ["a", "b"]},
        "tools": [{"type": "custom", "custom": {"name": "patch"}}], "logprobs": True, "reasoning_effort": "low",
    }  # fmt: skip
    line = body(**fields)
    call = parsed(line, BatchDefaults()).call
    assert call == read_chat(line["body"])
    assert (call.options.regex, call.budget, call.custom) == ("a|b", False, {"patch"})
    digests = {
        parsed(body(**fields)).digest
        for fields in ({}, {"reasoning_effort": "low"}, {"thinking": {"type": "disabled"}})
    }
    assert len(digests) == 3
    texts = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ["Once"], "logprobs": 2}}
    assert parsed(texts).call == read_completion(texts["body"])
    texts["body"]["prompt"] = ["Once", "more"]
    assert "one text" in refused(texts)


@pytest.mark.parametrize("field", ["continue_final_message", "headrace", "suffix"])
def test_fields_of_the_server_alone_are_refused_by_name(field: str) -> None:
    assert field in refused(body(**{field: True}))


@pytest.mark.parametrize("variables", [{}, {"chat_template_kwargs": [1]}, {"chat_template_kwargs": "{"}])
@pytest.mark.parametrize("effort", [["low"], {}, 1, "low"])
def test_an_effort_or_variables_of_another_type_are_refused_by_name(
    effort: object, variables: dict[str, object]
) -> None:
    line = parse_line(json.dumps(body(reasoning_effort=effort, **variables)).encode(), 1, DEFAULTS)
    if effort == "low" and not variables:
        assert isinstance(line, BatchLine)
    else:
        assert isinstance(line, BadLine)
        assert str(line.error).startswith("chat_template_kwargs" if variables else "reasoning_effort")
