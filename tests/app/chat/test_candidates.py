"""Candidates against a scripted engine: requests, storage, taking one."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from headrace.app.chat.answer_setup import WARMER
from headrace.app.chat.candidates import Candidates
from headrace.app.chat.conversation import Conversation
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.sessions.export import exported
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import EngineError, SessionError, UsageError
from tests.support.patience import PATIENCE_S
from tests.support.polling import until
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.tiny_chat import write_chat_model


@pytest.fixture
def talk(store: SessionStore, engine: ScriptedEngine) -> Conversation:
    talk = Conversation(engine, store)
    talk.load_model()
    talk.poll()
    engine.script(Script(("the ", "first")))
    talk.send("what?")
    while talk.phase != "idle":
        talk.poll()
    return talk


def over(it: Candidates) -> None:
    until(it, lambda: it.phase == "idle")


def answers(talk: Conversation) -> list[str]:
    """Return all answers, oldest first."""
    return [message.content for message in talk.store.messages(talk.session.id) if message.role == "assistant"]


def test_candidates_speculate_as_the_session_does(talk: Conversation, engine: ScriptedEngine) -> None:
    talk.branch.set_sampling({**talk.session.sampling, "speculate": "off"})
    before = len(engine.commands)
    it = Candidates(talk, 2)
    over(it)
    assert [command.options.speculate for command in engine.commands[before:]] == ["off", "off"]


def test_candidates_are_generated_in_parallel_and_one_is_chosen(talk: Conversation, engine: ScriptedEngine) -> None:
    talk.branch.set_sampling({"seed": 5})
    engine.script(*(Script((f"{n}", "a", "b")) for n in range(3)))
    it = Candidates(talk, 3)
    assert len(engine.commands) == 4  # one before: all are asked at once
    assert [command.options.seed for command in engine.commands[1:]] == [6, 7, 8]
    assert {command.messages[-1]["content"] for command in engine.commands[1:]} == {"what?"}
    assert it.ids == tuple(command.id for command in engine.commands[1:])
    until(it, lambda: all(side.answer is not None for side in it.answers))
    assert it.phase == "answering"
    assert it.growing == 3  # none waited for another
    with pytest.raises(UsageError, match="2 "):
        it.take(it.answers[1])
    over(it)
    it.take(it.answers[1])
    assert [message.content for message in talk.messages] == ["what?", "1ab"]
    assert answers(talk) == ["the first", "0ab", "1ab", "2ab"]
    assert talk.branch.alternatives(talk.messages[-1].id).ids == tuple(
        message.id for message in talk.store.messages(talk.session.id) if message.role == "assistant"
    )
    json = exported(talk.store, talk.session.id, Path("all.json"))
    assert all(text in json for text in ("0ab", "1ab", "2ab"))
    talk.send("and then?")  # the conversation goes on
    assert engine.commands[-1].messages[1]["content"] == "1ab"


@pytest.mark.parametrize("what", ["session", "question", "answer"])
def test_candidates_deleted_by_another_process_can_be_left(
    talk: Conversation, engine: ScriptedEngine, tmp_path: Path, what: str
) -> None:
    engine.script(*(Script((f"{n}", "a", "b"), hold=1) for n in range(2)))
    it = Candidates(talk, 2)
    until(it, lambda: all(side.answer and side.answer.content.endswith("a") for side in it.answers))
    with closing(SessionStore(tmp_path / "sessions.db")) as other:
        if what == "session":
            other.delete(talk.session.id)
        else:
            lost = it.question if what == "question" else it.answers[0].answer
            assert lost is not None
            other.remove(lost)
    engine.release()
    over(it)
    assert it.answers[0].notice is not None
    assert "deleted" in it.answers[0].notice
    branch = it.answers[0].branch
    if what != "session":
        asked = [] if what == "question" else ["what?"]
        assert [message.content for message in branch.messages] == asked
        assert branch.leaf == (branch.messages[-1].id if asked else None)
    it.take(None)
    left = {"session": ["what?", "the first"], "question": [], "answer": ["what?", "the first"]}[what]
    assert [message.content for message in talk.messages] == left
    assert (talk.notice is None) == (what == "answer")


def test_stopping_keeps_partial_candidates(talk: Conversation, engine: ScriptedEngine) -> None:
    engine.script(*(Script((f"{n}", "a", "b"), hold=1) for n in range(2)))
    it = Candidates(talk, 2)
    until(it, lambda: all(side.answer and side.answer.content.endswith("a") for side in it.answers))
    it.stop()
    over(it)
    assert answers(talk) == ["the first", "0a", "1a"]
    assert all(side.answer and side.answer.partial for side in it.answers)
    it.take(None)
    assert talk.messages[-1].content == "the first"


def test_leaving_keeps_partial_candidates(talk: Conversation, engine: ScriptedEngine) -> None:
    engine.script(*(Script((f"{n}", "a", "b"), hold=1) for n in range(2)))
    it = Candidates(talk, 2)
    until(it, lambda: all(side.answer and side.answer.content.endswith("a") for side in it.answers))
    it.close()
    assert answers(talk) == ["the first", "0a", "1a"]
    for _ in range(5):
        talk.poll()  # what the engine still says of them meets nobody
    assert talk.phase == "idle"
    assert answers(talk) == ["the first", "0a", "1a"]


def test_partial_candidates_are_stored(talk: Conversation, engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script(*(Script((f"{n}", "a", "b"), hold=1) for n in range(2)))
    it = Candidates(talk, 2)
    until(it, lambda: all(side.answer and side.answer.content.endswith("a") for side in it.answers))
    another = SessionStore(tmp_path / "sessions.db")  # as after a SIGKILL
    said = [message.content for message in another.messages(talk.session.id)]
    another.close()
    assert said == ["what?", "the first", "0a", "1a"]
    it.close()


@pytest.mark.parametrize("count", [-1, 0, 1, 9])
def test_a_number_out_of_range_is_refused_by_name(talk: Conversation, count: int) -> None:
    with pytest.raises(UsageError, match=str(count)):
        Candidates(talk, count)


def test_refused_where_nothing_was_asked_or_an_answer_grows(store: SessionStore, engine: ScriptedEngine) -> None:
    talk = Conversation(engine, store)
    talk.load_model()
    talk.poll()
    with pytest.raises(UsageError):
        Candidates(talk, 2)
    talk.send("what?")
    with pytest.raises(EngineError):
        Candidates(talk, 2)


def test_candidates_of_a_greedy_session_are_sampled_and_reported(talk: Conversation, engine: ScriptedEngine) -> None:
    talk.branch.set_sampling({"temperature": 0.0})
    it = Candidates(talk, 2)
    assert it.notice is not None
    assert it.notice == WARMER
    assert engine.commands[-1].options.temperature > 0
    it.close()


def test_an_engine_crash_keeps_partial_candidates(talk: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(("one", "more"), hold=1), Script(fail="no memory"))
    it = Candidates(talk, 2)
    until(it, lambda: it.answers[0].answer is not None and it.answers[1].notice is not None)
    assert it.answers[1].notice == "no memory"
    assert it.growing == 1
    engine.die()
    over(it)
    assert it.answers[0].answer is not None
    assert it.answers[0].answer.finish_reason == "died"
    with pytest.raises(UsageError, match="2 "):
        it.take(it.answers[1])
    it.take(it.answers[0])
    assert talk.messages[-1].content == "one"


def test_a_model_that_still_loads_is_waited_for(talk: Conversation) -> None:
    talk.load_model()
    it = Candidates(talk, 2)
    assert {side.phase for side in it.answers} == {"loading"}
    over(it)
    assert all(side.answer is not None for side in it.answers)


def test_a_full_disk_is_reported_and_retried(
    talk: Conversation, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script(*(Script((f"{n}", "a")) for n in range(2)))
    it = Candidates(talk, 2)
    until(it, lambda: all(side.answer is not None for side in it.answers))

    def full(*_: object, **__: object) -> None:
        raise SessionError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(talk.store, "finish", full)
        patch.setattr(talk.store, "grow", full)
        over(it)
        assert it.notice == "the disk is full"
        with pytest.raises(SessionError):
            it.take(it.answers[0])
    it.take(it.answers[0])
    assert answers(talk) == ["the first", "0a", "1a"]


def test_a_refused_request_on_a_full_disk_keeps_the_others(
    talk: Conversation, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SessionError("the disk is full")

    with monkeypatch.context() as patch:

        def refuse(_: object) -> None:
            patch.undo()  # the next request is accepted
            patch.setattr(talk.store, "branch", full)
            raise EngineError("too many requests")

        patch.setattr(engine, "submit", refuse)
        it = Candidates(talk, 2)
        assert it.notice is None  # of a refused request nothing is to be stored
    over(it)
    refused, answered = it.answers
    assert (refused.notice, refused.answer) == ("too many requests", None)
    assert answered.answer is not None
    assert answered.answer.content == "Hello, world."


def waited(it: Candidates | Conversation) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while it.phase != "idle":
        assert time.monotonic() < deadline
        it.poll()
        time.sleep(0.005)


def test_candidates_equal_answers_generated_alone(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    model = write_chat_model(tmp_path / "chat", context=1_000_000)
    client = EngineClient()
    try:
        talk = Conversation(client, store, store.create(model=str(model)), ModelSpec(context=1000))
        talk.branch.set_sampling({"temperature": 1.0, "seed": 5, "max_tokens": 40})
        talk.load_model()
        talk.send("what? " * 40)  # more than a block, so that there is something to share
        waited(talk)
        it = Candidates(talk, 3)
        waited(it)
        assert len({side.answer.content for side in it.answers if side.answer is not None}) == 3
        it.take(it.answers[2])
        for number, side in enumerate(it.answers):
            there = len(talk.branch.alternatives(talk.messages[-1].id).ids)
            talk.branch.set_sampling({"seed": 6 + number - there})
            talk.regenerate()
            waited(talk)
            assert side.answer is not None
            assert talk.messages[-1].content == side.answer.content
    finally:
        client.close()
