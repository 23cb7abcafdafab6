"""Comparison of two setups against scripted engines: order, storage, memory."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.comparison import Comparison
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelAnswer
from headrace.app.engine.events import Damaged
from headrace.app.model_info import model_report as models_report
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import EngineError, SessionError, UsageError
from headrace.runtime.machine.memory import MemoryBudget
from tests.support.polling import until
from tests.support.scripted_engine import CARD, Script, ScriptedEngine

GIB = 1 << 30
WARM = AnswerSetup(None, "", {"temperature": 1.2})
OTHER = AnswerSetup("other-1b", "", {})


@pytest.fixture
def talk(store: SessionStore) -> Conversation:
    budget = MemoryBudget(16 * GIB, 8 * GIB, GIB, "available RAM")
    engine = ScriptedEngine(card_to_load=replace(CARD, budget=budget))
    talk = Conversation(engine, store)
    talk.load_model()
    talk.poll()
    return talk


def engine_of(talk: Conversation) -> ScriptedEngine:
    assert isinstance(talk.engine, ScriptedEngine)
    return talk.engine


def no_second() -> ScriptedEngine:
    raise AssertionError("no second engine is wanted")


def say(talk: Conversation, text: str, *pieces: str) -> None:
    engine_of(talk).script(Script(pieces))
    talk.send(text)
    while talk.phase != "idle":
        talk.poll()


def until_over(it: Comparison) -> None:
    until(it, lambda: it.phase == "idle" and it.running is None)


def said(side: ParallelAnswer) -> list[str]:
    return [message.content for message in side.messages]


def needs(monkeypatch: pytest.MonkeyPatch, bytes: int | None) -> None:
    monkeypatch.setattr(models_report, "memory_needed", lambda _: bytes)


def test_both_sides_are_asked_one_after_the_other(talk: Conversation) -> None:
    talk.branch.set_sampling({"temperature": 0.0})
    it = Comparison(talk, WARM, no_second)
    assert it.running is None
    engine_of(talk).script(Script(("Cold ", "answer.")), Script(("Warm ", "answer.")))
    it.ask("Which?")
    a, b = it.answers
    assert (a.phase, b.phase) == ("waiting", "queued")
    until(it, lambda: said(a)[-1] == "Cold ")
    assert b.phase == "queued"
    assert len(engine_of(talk).commands) == 1  # B's is not even submitted
    assert talk.store.messages(talk.session.id)[-1].content == "Cold "
    until_over(it)
    assert (said(a), said(b)) == (["Which?", "Cold answer."], ["Which?", "Warm answer."])
    first, second = engine_of(talk).commands
    assert first.messages == second.messages
    assert (first.options.given(), second.options.given()) == ({"temperature": 0.0}, {"temperature": 1.2})
    assert [len(talk.store.alternatives(side.messages[-1])) for side in it.answers] == [2, 2]
    kept = [message.sampling for message in talk.store.messages(talk.session.id) if message.role == "assistant"]
    assert [sampling["temperature"] for sampling in kept if sampling] == [0.0, 1.2]
    assert engine_of(talk).rests == 0


def test_an_existing_answer_becomes_side_a(talk: Conversation) -> None:
    say(talk, "Earlier", "E.")
    say(talk, "Which?", "Here.")
    engine_of(talk).script(Script(("There.",)))
    it = Comparison(talk, WARM, no_second)
    until_over(it)
    a, b = it.answers
    assert (said(a), said(b)) == (["Earlier", "E.", "Which?", "Here."], ["Earlier", "E.", "Which?", "There."])
    assert it.first == 2
    it.take(None)
    assert [message.content for message in talk.messages] == said(a)

    talk.branch.set_sampling({"temperature": 0.1})  # what is there was not said with this
    it = Comparison(talk, WARM, no_second)
    until_over(it)
    assert it.answers[0].messages[-1].sampling == {"temperature": 0.1, "min_p": 0.05}


def test_sides_continue_on_their_branches_and_one_is_taken(talk: Conversation) -> None:
    it = Comparison(talk, replace(WARM, system="Be warm."), no_second)
    engine_of(talk).script(*(Script((text,)) for text in ("a1", "b1", "a2", "b2")))
    it.ask("one")
    until_over(it)
    it.ask("two")
    until_over(it)
    a, b = it.answers
    assert (said(a), said(b)) == (["one", "a1", "two", "a2"], ["one", "b1", "two", "b2"])
    it.take(b)
    assert [message.content for message in talk.messages] == said(b)
    assert (talk.session.system, talk.session.sampling) == ("Be warm.", {"temperature": 1.2})
    assert talk.branch.alternatives(talk.messages[1].id).ids == (a.messages[1].id, b.messages[1].id)
    talk.switch_branch(talk.messages[1].id, -1)
    assert [message.content for message in talk.messages] == said(a)


def test_stopping_the_first_side_starts_the_second(talk: Conversation) -> None:
    it = Comparison(talk, WARM, no_second)
    engine_of(talk).script(Script(("a",) * 9, hold=5), Script(("b",) * 9, hold=5))
    it.ask("Which?")
    a, b = it.answers
    until(it, lambda: said(a)[-1] == "aaaa")
    with pytest.raises(EngineError):
        it.ask("More")
    it.stop()
    until(it, lambda: said(b)[-1] == "bbbb")
    it.stop()
    until_over(it)
    assert [side.messages[-1].finish_reason for side in it.answers] == ["cancelled", "cancelled"]


def test_each_side_speculates_by_its_settings(talk: Conversation) -> None:
    talk.branch.set_sampling({"speculate": "off"})
    it = Comparison(talk, replace(AnswerSetup.of(talk.session), sampling={"speculate": "ngram"}), no_second)
    it.ask("Which?")
    until_over(it)
    assert [command.options.speculate for command in engine_of(talk).commands] == ["off", "ngram"]


def test_another_comparison_keeps_earlier_answers(talk: Conversation) -> None:
    it = Comparison(talk, WARM, no_second)
    with pytest.raises(UsageError):
        it.again()
    it.ask("Which?")
    until_over(it)
    before = [side.messages[-1] for side in it.answers]
    it.again()
    until_over(it)
    assert talk.store.alternatives(before[0])[:2] == [message.id for message in before]
    assert len(talk.store.alternatives(before[0])) == 4


def test_a_second_model_that_fits_gets_an_engine_and_the_other_rests(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(monkeypatch, 2 * GIB)
    second = ScriptedEngine(card_to_load=replace(CARD, name="other-1b"))
    it = Comparison(talk, OTHER, lambda: second)
    for _ in range(2):
        it.ask("Which?")
        until_over(it)
    assert it.has_two_engines
    assert [spec.name for spec in second.specs] == ["other-1b"]
    assert len(engine_of(talk).specs) == 1  # neither was loaded twice
    assert (engine_of(talk).rests, second.rests) == (2, 1)
    assert [side.messages[-1].model for side in it.answers] == ["scripted-1b", "other-1b"]
    it.take(it.answers[0])
    assert (second.state, talk.engine.state) == ("stopped", "ready")
    assert len(engine_of(talk).specs) == 1


@pytest.mark.parametrize("bytes", [8 * GIB, None])
def test_a_second_model_that_does_not_fit_takes_turns_with_the_first(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, bytes: int | None
) -> None:
    needs(monkeypatch, bytes)
    it = Comparison(talk, OTHER, no_second)
    it.ask("Which?")
    until_over(it)
    assert not it.has_two_engines
    it.ask("And?")
    until_over(it)
    specs = engine_of(talk).specs
    assert [spec.name for spec in specs] == [None, "other-1b", None, "other-1b"]
    it.take(it.answers[1])  # whose model is loaded
    assert talk.session.model == "other-1b"
    assert len(specs) == 4

    it = Comparison(talk, replace(WARM, model="third"), no_second)
    until_over(it)
    assert [spec.name for spec in specs[4:]] == ["third"]
    it.take(None)
    assert specs[-1].name == "other-1b"  # the session's again


def test_a_second_model_without_memory_takes_turns(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(monkeypatch, GIB)
    second = ScriptedEngine(load_failure="not enough memory: needs 9 GiB, but 2 GiB may be used")
    it = Comparison(talk, OTHER, lambda: second)
    it.ask("Which?")
    until_over(it)
    assert not it.has_two_engines
    assert [spec.name for spec in engine_of(talk).specs] == [None, "other-1b"]
    assert it.answers[1].messages[-1].content == "Hello, world."


def test_a_second_model_that_fails_to_load_keeps_the_answer_on_the_first(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(monkeypatch, GIB)
    second = ScriptedEngine()
    it = Comparison(talk, OTHER, lambda: second)
    it.ask("Which?")
    a, b = it.answers
    until(it, lambda: b.phase == "loading")
    it.stop()
    engine_of(talk).script(Script(("half", " more"), hold=1))
    it.ask("And?")
    second.load_failure = "not enough memory: needs 9 GiB, but 2 GiB may be used"
    until(it, lambda: said(a)[-1] == "half")
    assert not it.has_two_engines
    assert (it.running, b.phase) == (a, "queued")
    engine_of(talk).release()
    until_over(it)
    assert said(a)[-1] == "half more"
    assert said(b) == ["Which?", "And?", "Hello, world."]


def test_a_model_that_cannot_be_loaded_is_refused_with_figures(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(monkeypatch, None)
    it = Comparison(talk, OTHER, no_second)
    it.ask("Which?")
    until(it, lambda: it.running is it.answers[1])
    engine_of(talk).load_failure = "not enough memory: needs 9 GiB, but 2 GiB may be used"
    until_over(it)
    assert it.answers[1].notice == "not enough memory: needs 9 GiB, but 2 GiB may be used"
    assert said(it.answers[0]) == ["Which?", "Hello, world."]
    engine_of(talk).load_failure = None
    it.take(it.answers[0])
    assert engine_of(talk).specs[-1].name is None  # A's model comes back


def test_an_engine_crash_loses_one_answer_only(talk: Conversation) -> None:
    it = Comparison(talk, WARM, no_second)
    engine_of(talk).script(Script(("half", " more"), hold=1))
    it.ask("Which?")
    a, b = it.answers
    until(it, lambda: said(a)[-1] == "half")
    engine_of(talk).die()
    until_over(it)
    assert a.messages[-1].finish_reason == "died"
    assert "SIGKILL" in str(a.notice)
    assert said(b)[-1] == "Hello, world."


def test_damaged_weights_are_reported_with_the_remedy(talk: Conversation) -> None:
    it = Comparison(talk, WARM, no_second)
    engine_of(talk)._backlog.append(Damaged("tiny is damaged", "remove it"))
    it.poll()
    assert it.notice == "tiny is damaged (remove it)"


def test_a_question_longer_than_the_context_is_reported(talk: Conversation) -> None:
    it = Comparison(talk, WARM, no_second)
    engine_of(talk).script(Script(full=True), Script(fail="the template refuses it"))
    it.ask("Which?")
    until_over(it)
    assert "the context is full" in str(it.answers[0].notice)
    assert it.answers[1].notice == "the template refuses it"
    assert [said(side) for side in it.answers] == [["Which?"], ["Which?"]]


def test_leaving_a_comparison_keeps_both_partial_answers(talk: Conversation, tmp_path: Path) -> None:
    it = Comparison(talk, WARM, no_second)
    engine_of(talk).script(Script(("whole.",)), Script(("ha", "lf", "!"), hold=1))
    it.ask("Which?")
    until(it, lambda: said(it.answers[1])[-1] == "half")
    killed = SessionStore(tmp_path / "sessions.db")  # what a killed process would leave
    killed.recover(talk.session.id)
    assert [message.content for message in killed.messages(talk.session.id)] == ["Which?", "whole.", "half"]
    killed.close()
    it.close()
    talk.close()
    assert [m.finish_reason for m in talk.store.messages(talk.session.id)] == [None, "stop", "cancelled"]


def test_a_failing_store_is_reported_and_retried(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Comparison(talk, WARM, no_second)
    it.ask("Which?")

    def full(*_: object, **__: object) -> None:
        raise SessionError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(talk.store, "finish", full)
        until_over(it)
        assert it.notice == "the disk is full"
        with pytest.raises(SessionError):
            it.close()
    it.close()
    whole = [m.finish_reason for m in talk.store.messages(talk.session.id) if m.role == "assistant"]
    assert whole == ["stop", "stop"]


def test_nothing_is_compared_while_an_answer_is_written(talk: Conversation) -> None:
    talk.send("Hi")
    with pytest.raises(EngineError):
        Comparison(talk, WARM, no_second)
