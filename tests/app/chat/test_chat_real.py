"""A chat with the real default model, from the first question to a resumed session, through the real engine process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.app.chat.conversation import Conversation
from headrace.app.engine.client import EngineClient
from headrace.app.engine.events import Delta, Event
from headrace.app.sessions.export import to_markdown
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.real


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineClient]:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    client = EngineClient()
    yield client
    client.close()


@pytest.fixture
def chat(client: EngineClient, store: SessionStore, default_model: Path) -> Conversation:
    chat = Conversation(client, store, store.create(model=str(default_model), sampling={"temperature": 0}))
    chat.load_model()
    return chat


def wait(chat: Conversation, true: Callable[[], bool]) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        events += chat.poll()
        assert time.monotonic() < deadline, chat.notice
        time.sleep(0.02)
    return events


def ask(chat: Conversation, text: str) -> list[Event]:
    chat.send(text)
    return wait(chat, lambda: chat.phase == "idle")


def test_a_chat_session_with_the_default_model(chat: Conversation, client: EngineClient, store: SessionStore) -> None:
    events = ask(chat, "What is the capital of France?")
    question, answer = chat.messages
    assert "Paris" in answer.content
    assert not answer.partial
    assert answer.metrics is not None
    records = [record for event in events if isinstance(event, Delta) for record in event.records]
    said = sum(record.tokens for record in records)
    assert said == answer.metrics.completion_tokens + 1  # the end of the turn is said too
    assert client.card is not None
    assert {record.weight_bytes for record in records} == {client.card.cost.weight_bytes}

    chat.branch.set_sampling({"max_tokens": 40})  # a sampled answer may go on and on
    chat.regenerate()
    wait(chat, lambda: chat.phase == "idle")
    again = chat.messages[-1]
    assert again.id != answer.id
    assert again.content
    assert "sampled at" in chat.notice  # temperature 0 would have repeated the answer
    assert again.metrics is not None
    assert again.metrics.reused_tokens == again.metrics.prompt_tokens - 1
    chat.switch_branch(again.id, -1)  # on from the greedy answer: what follows a sampled one differs from run to run
    assert chat.messages[-1].id == answer.id
    chat.branch.set_sampling({"max_tokens": None})

    chat.send("Tell me a very long story about a water mill.")
    wait(chat, lambda: len(chat.messages[-1].content) > 100)
    chat.stop()
    wait(chat, lambda: chat.phase == "idle")
    stopped = chat.messages[-1]
    assert stopped.partial
    chat.branch.set_sampling({"max_tokens": 16})
    chat.continue_answer()
    wait(chat, lambda: chat.phase == "idle")
    assert chat.messages[-1].content.startswith(stopped.content)
    assert chat.messages[-1].metrics is not None
    assert chat.messages[-1].metrics.reused_tokens > 50

    assert client.pid is not None
    chat.branch.set_sampling({"max_tokens": None})
    chat.send("And now the same about a windmill.")
    wait(chat, lambda: chat.phase == "answering" and len(chat.messages[-1].content) > 20)
    os.kill(client.pid, signal.SIGKILL)
    wait(chat, lambda: client.state == "dead")
    assert len(chat.messages[-1].content) > 20
    client.restart()
    chat.edit(question.id, "What is the capital of Italy?")
    wait(chat, lambda: chat.phase == "idle")
    assert [message.partial for message in chat.messages] == [False, False]
    assert chat.messages[-1].content
    chat.switch_branch(chat.messages[0].id, -1)
    assert "windmill" in chat.messages[-2].content

    chat.close()
    resumed = Conversation(client, store, store.find("last"))
    assert resumed.messages == chat.messages
    assert [hit.message_id for hit in search(store, "capital Italy")] == [
        message.id for message in store.messages(chat.session.id) if "capital of Italy" in message.content
    ][::-1]
    assert "windmill" in to_markdown(resumed.session, resumed.messages)


def test_each_turn_prefills_only_its_new_tokens(chat: Conversation) -> None:
    chat.branch.set_sampling({"max_tokens": 12})
    reused = 0
    for turn in range(4):
        ask(chat, f"Name one animal, number {turn}.")
        metrics = chat.messages[-1].metrics
        assert metrics is not None
        assert metrics.reused_tokens >= reused
        assert (
            metrics.prompt_tokens - metrics.reused_tokens < 45
        )  # the question, a turn's frame, the answer's last token
        reused = metrics.prompt_tokens - 1
