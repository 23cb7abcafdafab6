"""Conversations as clients send them, over HTTP at every door, with templates that each drop or refuse something.

Nothing is lost or refused, calls that are forced or cut come back, and batches and the Python API have the same prompt.
HEADRACE_TEST_TEMPLATES names a folder of real chat templates (*.jinja) for the long campaign.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from headrace.app import api
from headrace.app.answer.tools import read_tools
from headrace.app.batch.parse import BatchDefaults, BatchLine, parse_line
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.tokenizer import Tokenizer
from tests.models.text.test_adapt_messages import TEMPLATES
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess
from tests.support.template_models import install_templates

OWN = {
    f"own-{number}": TEMPLATES[name]
    for number, name in enumerate([
        "no system", "later system dropped", "alternation", "one call", "text or calls", "no calls", "ids of nine",
        "arguments as text", "contents in parts", "calls named by ids",
    ])
}  # fmt: skip
_FOLDER = os.environ.get("HEADRACE_TEST_TEMPLATES")
REAL = {file.stem: file for file in sorted(Path(_FOLDER).glob("*.jinja"))} if _FOLDER else {}

PARAMETERS = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "maxLength": 4},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "unit": {"enum": ["m", "km"]},
    },
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "list_tabs"}},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def call(identifier: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identifier, "type": "function", "function": {"name": "look", "arguments": text}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "developer between turns": [
        said("system", "wordA"), said("user", "wordB"), said("developer", "wordC"), said("user", "wordD"),
    ],
    "system at the end": [
        said("system", "wordA"), said("user", "wordB"), said("assistant", "wordC"), said("system", "wordD"),
    ],
    "parallel calls with text, results out of order": [
        said("system", "wordA"), said("user", "wordB"),
        said("assistant", "wordC", tool_calls=[call("toolu_01Ab", {"at": "wordD"}), call("x", {"at": "wordE"})]),
        said("tool", "wordG", tool_call_id="x"), said("tool", "wordF", tool_call_id="toolu_01Ab"),
        said("user", "wordH"),
    ],
    "the same identifier in each round": [
        said("user", "wordA"), said("assistant", None, tool_calls=[call("call_0", {"at": "wordB"})]),
        said("tool", "wordC", tool_call_id="call_0"),
        said("assistant", "wordD", tool_calls=[call("call_0", {"at": "wordE"})]),
        said("tool", "wordF", tool_call_id="call_0"),
    ],
    "arguments that a limit cut": [
        said("user", "wordA"), said("assistant", "", tool_calls=[call("call_a", '{"at": "wordB')]),
        said("user", "wordC"),
    ],
    "images in the history": [
        said("user", [{"type": "text", "text": "wordA"}, IMAGE]), said("assistant", "wordB"), said("user", [IMAGE]),
        said("assistant", "wordC"), said("user", "wordD"),
    ],
    "a history that was trimmed": [
        said("tool", "wordA", tool_call_id="gone"), said("assistant", "", tool_calls=[call("call_b", {"at": "wordB"})]),
        said("tool", [{"type": "text", "text": "wordC"}, IMAGE], tool_call_id="call_b"), said("assistant", "wordD"),
        said("assistant", "wordE"), said("user", ""), said("user", "wordF"),
    ],
}  # fmt: skip


def response_body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a conversation as a body of the Responses API."""
    entries: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            output = content if isinstance(content, str) else [_response_part(part, "input") for part in content]
            entries.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
            continue
        if content or not message.get("tool_calls"):
            kind = "output" if message["role"] == "assistant" else "input"
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            entries.append({"role": message["role"], "content": [_response_part(part, kind) for part in parts]})
        for each in message.get("tool_calls", ()):
            entries.append({"type": "function_call", "call_id": each["id"], **each["function"]})
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    return {"input": entries, "tools": tools, "max_output_tokens": 1}


def _response_part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": f"{kind}_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"]}


def message_body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a conversation as a body of Anthropic's API."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"] or ""
        blocks = (
            [_block(part) for part in content] if isinstance(content, list) else [{"type": "text", "text": content}]
        )
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
        blocks += [_tool_use(each) for each in message.get("tool_calls", ())]
        role = {"developer": "system", "tool": "user"}.get(message["role"], message["role"])
        turns.append({"role": role, "content": blocks})
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {})} for tool in TOOLS
    ]
    return {"messages": turns, "tools": tools, "max_tokens": 1}


def _block(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image", "source": {}}


def _tool_use(made: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(made["function"]["arguments"])
    except ValueError:
        arguments = {"arguments": made["function"]["arguments"]}
    return {"type": "tool_use", "id": made["id"], "name": made["function"]["name"], "input": arguments}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("templates") / "home"
    install_templates(home, OWN | {name: file.read_text() for name, file in REAL.items()})
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    arguments = ("-m", "own-0", "--idle-unload", "10")
    with ServerProcess(home, *arguments) as server, httpx.Client(base_url=server.root, timeout=PATIENCE_S) as client:
        yield client


def ask(client: httpx.Client, door: str, model: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{door}", json={"model": model, "headrace": {"explain": True}, **body})
    assert answer.status_code == 200, (model, door, answer.text)
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for part in answer["headrace"]["prompt"])


def keeps_conversations(client: httpx.Client, home: Path, model: str) -> None:
    """Check that each text of each conversation is in the prompt, at every door."""
    tokenizer = Tokenizer.load(home / "data" / "models" / model)
    encoder = ChatPrompt(tokenizer)
    for name, messages in CONVERSATIONS.items():
        words = [f"word{letter}" for letter in "ABCDEFGH" if f"word{letter}" in json.dumps(messages)]
        body = {"messages": messages, "tools": TOOLS}
        chat = prompt_of(ask(client, "chat/completions", model, **body, max_tokens=1))
        prompts = {
            "chat": chat,
            "responses": prompt_of(ask(client, "responses", model, **response_body(messages))),
            "messages": prompt_of(ask(client, "messages", model, **message_body(messages))),
        }
        for door, prompt in prompts.items():
            assert [word for word in words if word not in prompt] == [], (model, name, door)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        parsed = parse_line(json.dumps(line).encode(), 1, BatchDefaults())
        assert isinstance(parsed, BatchLine), (name, parsed)
        tools = read_tools(TOOLS)
        for asked in (parsed.prompt, api._messages(messages)):
            assert tokenizer.decode(encoder.encode(asked, tools=tools), skip_special=False) == chat, (model, name)


def returns_calls(client: httpx.Client, model: str) -> None:
    """Check forced calls, whole and cut: they fit the schema, and come back in the history."""
    question = [said("user", "hello")]
    forced = {"messages": question, "tools": TOOLS, "temperature": 1, "seed": 1}
    named = {"type": "function", "function": {"name": "look"}}
    for more in ({}, {"parallel_tool_calls": False, "tool_choice": named}, {"max_tokens": 40, "tool_choice": named}):
        body = {**forced, "tool_choice": "required", "max_tokens": 300, **more}
        (choice,) = ask(client, "chat/completions", model, **body)["choices"]
        answer = choice["message"]
        calls = answer.get("tool_calls") or []
        if choice["finish_reason"] == "tool_calls":
            assert calls
            assert len(calls) == 1 or "parallel_tool_calls" not in more
            for made in calls:
                arguments = json.loads(made["function"]["arguments"])
                if made["function"]["name"] == "look":
                    assert isinstance(arguments["at"], str), (model, calls)
                    assert arguments.keys() <= {"at", "note", "unit"}, (model, calls)
        else:
            assert choice["finish_reason"] == "length", choice
        results = [said("tool", "wordR", tool_call_id=made["id"]) for made in calls]
        again = ask(
            client, "chat/completions", model, messages=[*question, answer, *results], tools=TOOLS, max_tokens=1
        )
        assert prompt_of(again).count("wordR") == len(calls), (model, calls)


@pytest.mark.sampled
@pytest.mark.parametrize("model", OWN)
def test_no_endpoint_loses_messages_or_calls(client: httpx.Client, home: Path, model: str) -> None:
    keeps_conversations(client, home, model)
    returns_calls(client, model)


@pytest.mark.nightly
@pytest.mark.skipif(not REAL, reason="HEADRACE_TEST_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("model", REAL)
def test_no_message_or_call_is_lost_with_a_real_template(client: httpx.Client, home: Path, model: str) -> None:
    keeps_conversations(client, home, model)
    returns_calls(client, model)
