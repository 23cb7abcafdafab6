"""Comparisons through real engine processes: two tiny models, and the default model against itself."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.comparison import Comparison
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelEvent
from headrace.app.engine.client import EngineClient
from headrace.app.engine.events import Delta
from headrace.app.model_info.model_report import memory_needed
from headrace.app.sessions.export import to_markdown
from headrace.app.sessions.store import SessionStore
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

NOISE = {"temperature": 1.0, "seed": 3, "max_tokens": 40}


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineClient]]:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    clients = [EngineClient()]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


def compare(talk: Conversation, other: AnswerSetup, clients: list[EngineClient]) -> Comparison:
    def second() -> EngineClient:
        clients.append(EngineClient())
        return clients[-1]

    return Comparison(talk, other, second)


def wait(it: Comparison | Conversation, true: Callable[[], object]) -> list[ParallelEvent]:
    heard: list[ParallelEvent] = []
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        heard += [event if isinstance(event, tuple) else (None, event) for event in it.poll()]
        assert time.monotonic() < deadline, it.notice
        time.sleep(0.01)
    return heard


def over(it: Comparison) -> list[ParallelEvent]:
    return wait(it, lambda: it.running is None and all(side.answer is not None for side in it.answers))


def decoded(heard: list[ParallelEvent]) -> list[str]:
    """Return the names of decoding answers in order, without repetitions."""
    names = [side.name for side, event in heard if side is not None and isinstance(event, Delta) and event.records]
    return [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]


def test_two_models_answer_side_by_side(clients: list[EngineClient], store: SessionStore, tmp_path: Path) -> None:
    one, two = (write_chat_model(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    needed = memory_needed(str(two))
    assert needed is not None
    assert needed > 40 << 20  # the program itself counts
    talk = Conversation(clients[0], store, store.create(model=str(one), sampling=NOISE))
    talk.load_model()
    wait(talk, lambda: clients[0].state == "ready")
    it = compare(talk, AnswerSetup(str(two), "", {**NOISE, "max_tokens": 30}), clients)
    it.ask("hello")
    assert decoded(over(it)) == ["A", "B"]
    assert it.has_two_engines
    it.ask("more")
    assert decoded(over(it)) == ["A", "B"]
    for side, name, most in zip(it.answers, ("one", "two"), (40, 30), strict=True):
        answer = side.messages[-1]
        assert (answer.model, len(side.messages)) == (name, 4)
        assert answer.metrics is not None
        assert answer.metrics.completion_tokens <= most
        assert answer.metrics.reused_tokens > 0  # each engine has kept its own conversation
        assert answer.sampling is not None
        assert answer.sampling["max_tokens"] == most
    second = clients[1].pid
    assert second is not None
    it.take(it.answers[1])
    assert talk.session.model == str(two)
    wait(talk, lambda: clients[0].state == "ready" and clients[0].card is not None)
    assert clients[0].card is not None
    assert clients[0].card.name == "two"
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_models_without_room_for_both_answer_in_turn(
    clients: list[EngineClient], store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.app.chat.comparison.fits_with", lambda *_: False)
    one, two = (write_chat_model(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    talk = Conversation(clients[0], store, store.create(model=str(one), sampling=NOISE))
    it = compare(talk, AnswerSetup(str(two), "", NOISE), clients)  # nothing is loaded yet
    it.ask("hello")
    assert decoded(over(it)) == ["A", "B"]
    assert (len(clients), [side.messages[-1].model for side in it.answers]) == (1, ["one", "two"])
    it.take(None)
    wait(talk, lambda: clients[0].state == "ready")
    assert clients[0].card is not None
    assert clients[0].card.name == "one"


@pytest.mark.real
def test_the_default_model_is_compared_with_itself_at_two_temperatures(
    clients: list[EngineClient], store: SessionStore, default_model: Path
) -> None:
    model = str(default_model)
    talk = Conversation(clients[0], store, store.create(model=model, sampling={"temperature": 0.0, "max_tokens": 60}))
    talk.send("What is the capital of France?")
    wait(talk, lambda: talk.phase == "idle")
    it = compare(talk, AnswerSetup(model, "", {"temperature": 1.3, "seed": 5, "max_tokens": 60}), clients)
    over(it)
    it.ask("Tell me about a water mill.")
    assert decoded(over(it)) == ["A", "B"]
    a, b = it.answers
    assert "Paris" in a.messages[1].content
    assert a.messages[-1].content != b.messages[-1].content
    for side in it.answers:
        went = side.messages[-1].metrics
        assert went is not None
        assert went.decode_tokens_per_second is not None
        assert went.ttft_s is not None
    it.take(b)
    assert "temperature 1.3" in to_markdown(talk.session, talk.messages)
