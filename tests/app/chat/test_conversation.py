"""Conversation against a scripted engine: actions, ends of answers, storage."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headrace.app.answer.options import AnswerOptions
from headrace.app.chat import turn as conversation_turn
from headrace.app.chat.conversation import Conversation
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.events import ContextFull, Damaged, Delta, Done, Dropped, Event, Ready
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError, EngineError, ModelNotFoundError, SessionError, UsageError
from tests.support.scripted_engine import Script, ScriptedEngine, with_context


@pytest.fixture
def chat(engine: ScriptedEngine, store: SessionStore) -> Conversation:
    chat = Conversation(engine, store)
    chat.load_model()
    chat.poll()
    return chat


def ahead(engine: ScriptedEngine) -> list[list[str]]:
    """Return the texts of each prompt prefetch."""
    return [[message["content"] for message in command.messages] for command in engine.ahead]


def until_idle(chat: Conversation) -> list[Event]:
    events: list[Event] = []
    for _ in range(200):
        events += chat.poll()
        if chat.phase == "idle":
            return events
    raise AssertionError("the answer never ended")


def until_asked(chat: Conversation, phase: str) -> None:
    for _ in range(200):
        if chat.phase == phase:
            return
        chat.poll()
    raise AssertionError(chat.phase)


def until_said(chat: Conversation, text: str) -> None:
    for _ in range(200):
        chat.poll()
        if chat.messages and chat.messages[-1].content == text:
            return
    raise AssertionError(chat.messages)


def shown(chat: Conversation) -> list[str]:
    return [message.content for message in chat.messages]


def stored(chat: Conversation) -> list[str]:
    return [message.content for message in chat.store.branch(chat.session.id)]


def ask(chat: Conversation, text: str, *pieces: str) -> None:
    assert isinstance(chat.engine, ScriptedEngine)
    chat.engine.script(Script(pieces=pieces))
    chat.send(text)
    until_idle(chat)


def test_a_turn_passes_through_its_phases_and_is_stored_as_it_grows(chat: Conversation) -> None:
    chat.send("Hi")
    assert (chat.phase, stored(chat)) == ("waiting", ["Hi"])
    chat.poll()
    assert (chat.phase, chat.branch.context_tokens) == ("prefill", 20)
    chat.poll()
    for so_far in ("Hello", "Hello, ", "Hello, world"):
        chat.poll()
        assert chat.phase == "answering"
        assert shown(chat) == stored(chat) == ["Hi", so_far]
        assert chat.store.branch(chat.session.id)[-1].partial
    until_idle(chat)
    answer = chat.messages[-1]
    assert (answer.content, answer.partial, answer.finish_reason) == ("Hello, world.", False, "stop")
    assert (answer.model, chat.branch.context_tokens) == ("scripted-1b", 24)
    assert answer.metrics is not None
    assert (answer.metrics.prompt_tokens, answer.metrics.completion_tokens, answer.metrics.mbu) == (20, 4, 0.31)
    assert chat.session.title == "Hi"


def test_the_whole_branch_is_sent_with_the_system_prompt_and_settings(
    chat: Conversation, engine: ScriptedEngine
) -> None:
    chat.branch.set_system("Be brief.")
    chat.branch.set_sampling({"temperature": 0.5, "max_tokens": 9, "stop": ["END"], "seed": 1, "thinking": False})
    chat.branch.set_sampling({"speculate": "off"})
    chat.branch.set_sampling({"seed": None})
    ask(chat, "one", "1")
    ask(chat, "two", "2")
    command = engine.commands[-1]
    assert command.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    assert command.options == AnswerOptions(
        temperature=0.5, max_tokens=9, stop=("END",), thinking=False, speculate="off"
    )


def test_stopping_keeps_the_partial_answer_and_it_can_be_continued(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("one ", "two ", "three"), hold=1), Script(pieces=("and on",)))
    chat.send("count")
    until_said(chat, "one two ")
    chat.stop()
    until_idle(chat)
    assert (chat.messages[-1].partial, chat.messages[-1].finish_reason) == (True, "cancelled")
    chat.continue_answer()
    assert engine.commands[-1].begun.text == "one two "
    assert engine.commands[-1].messages == [{"role": "user", "content": "count"}]
    until_idle(chat)
    assert shown(chat) == stored(chat) == ["count", "one two and on"]
    assert not chat.messages[-1].partial


def test_a_continued_answer_that_failed_has_no_figures(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("one ",), reason="length"), Script(pieces=("two ", "three"), hold=1))
    chat.send("count")
    until_idle(chat)
    assert chat.messages[-1].metrics is not None
    chat.continue_answer()
    until_said(chat, "one two ")
    engine.die()
    until_idle(chat)
    assert (chat.messages[-1].content, chat.messages[-1].metrics) == ("one two ", None)


def test_continuing_without_new_text_keeps_the_figures(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q", "whole")
    before = chat.messages[-1].metrics
    engine.script(Script(pieces=(), prompt_tokens=90))
    chat.continue_answer()
    until_idle(chat)
    assert shown(chat) == ["q", "whole"]
    assert chat.messages[-1].metrics == before


@pytest.mark.parametrize("end", ["dies", "is stopped", "is left"])
def test_texts_and_steps_of_the_engine_are_stored(chat: Conversation, engine: ScriptedEngine, end: str) -> None:
    engine.script(Script(pieces=("one ", "two ", "three"), hold=1), Script(pieces=("three", " four"), hold=1))
    chat.send("count")
    until_said(chat, "one two ")
    ended(chat, engine, end)
    assert stored(chat) == ["count", "one two "]
    if end == "is left":
        return
    chat.load_model()
    chat.poll()
    chat.continue_answer()
    until_said(chat, "one two three")
    ended(chat, engine, end)
    assert shown(chat) == stored(chat) == ["count", "one two three"]


def test_every_delta_is_in_the_store_and_on_the_disk_now_and_then(
    chat: Conversation, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[bool] = []
    grow = SessionStore.grow

    def noted(self: SessionStore, message_id: int, text: str, *, durable: bool = False) -> None:
        commits.append(durable)
        grow(self, message_id, text, durable=durable)

    monkeypatch.setattr(SessionStore, "grow", noted)
    engine.script(Script(pieces=("one ", "two ", "three ", "four"), hold=2))
    chat.send("count")
    until_said(chat, "one two ")
    assert commits == [False, False]
    monkeypatch.setattr(conversation_turn, "DURABLE_S", 0.0)
    engine.release()
    until_idle(chat)
    assert commits == [False, False, True, True]


def ended(chat: Conversation, engine: ScriptedEngine, how: str) -> None:
    if how == "dies":
        engine.die()
        until_idle(chat)
    elif how == "is stopped":
        engine.start(engine.specs[-1])
        until_idle(chat)
    else:
        chat.close()


def test_stopping_before_the_first_word_leaves_no_answer(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(hold=4))
    chat.send("hm")
    chat.poll()
    chat.stop()
    until_idle(chat)
    assert stored(chat) == ["hm"]
    ask(chat, "again", "yes")
    assert engine.commands[-1].messages == [{"role": "user", "content": "hm\n\nagain"}]  # roles keep alternating
    chat.switch_branch(chat.messages[0].id, 1)
    assert shown(chat) == ["hm", "again", "yes"]


def test_regenerate_edit_and_switch_make_branches(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q1", "a1")
    ask(chat, "q2", "a2")
    engine.script(Script(pieces=("a2 new",)))
    chat.regenerate()
    assert shown(chat) == ["q1", "a1", "q2"]
    until_idle(chat)
    assert shown(chat) == ["q1", "a1", "q2", "a2 new"]
    branches = chat.branch.alternatives(chat.messages[3].id)
    assert (len(branches.ids), branches.shown) == (2, 1)
    engine.script(Script(pieces=("b1",)))
    chat.edit(chat.messages[0].id, "Q1")
    until_idle(chat)
    assert shown(chat) == ["Q1", "b1"]
    edited = chat.messages[0].id
    chat.switch_branch(edited, -1)
    assert shown(chat) == ["q1", "a1", "q2", "a2 new"]
    chat.switch_branch(edited, 1)  # keys are quicker than the screen: the message may be of the branch before
    assert shown(chat) == ["Q1", "b1"]
    chat.switch_branch(edited, -1)
    chat.switch_branch(edited, -1)
    assert shown(chat) == ["q1", "a1", "q2", "a2 new"]
    chat.switch_branch(chat.messages[3].id, -1)
    assert shown(chat) == stored(chat) == ["q1", "a1", "q2", "a2"]
    chat.switch_branch(chat.messages[3].id, -1)
    assert shown(chat)[-1] == "a2"
    engine.script(Script(pieces=("a1 new",)))
    chat.regenerate(chat.messages[1].id)
    until_idle(chat)
    assert shown(chat) == ["q1", "a1 new"]


@pytest.mark.parametrize("end", ["is stopped early", "dies"])
def test_a_question_without_an_answer_is_asked_again(chat: Conversation, engine: ScriptedEngine, end: str) -> None:
    ask(chat, "Say hi", "hi")
    engine.script(Script(hold=4), Script(pieces=("fine",)))
    chat.send("And how are you?")
    chat.poll()
    if end == "dies":
        engine.die()
        until_idle(chat)
        chat.load_model()
    else:
        chat.stop()
    until_idle(chat)
    chat.poll()
    chat.regenerate()
    until_idle(chat)
    assert shown(chat) == stored(chat) == ["Say hi", "hi", "And how are you?", "fine"]


def test_any_question_can_be_asked_again(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q1", "a1")
    ask(chat, "q2", "a2")
    engine.script(Script(pieces=("a1 new",)))
    chat.regenerate(chat.messages[0].id)
    until_idle(chat)
    assert shown(chat) == ["q1", "a1 new"]
    assert len(chat.branch.alternatives(chat.messages[1].id).ids) == 2


def test_an_edited_answer_is_a_branch_and_can_be_continued(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q", "bad start")
    chat.edit(chat.messages[1].id, "Good start")
    assert shown(chat) == ["q", "Good start"]
    engine.script(Script(pieces=(", good end",)))
    chat.continue_answer()
    until_idle(chat)
    assert shown(chat) == stored(chat) == ["q", "Good start, good end"]
    assert len(chat.branch.alternatives(chat.messages[1].id).ids) == 2


def test_a_failed_regeneration_shows_the_old_answer_again(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q", "a")
    engine.script(Script(fail="the template does not like it"))
    chat.regenerate()
    until_idle(chat)
    assert shown(chat) == ["q", "a"]
    assert chat.notice == "the template does not like it"


def test_the_engine_dying_keeps_the_partial_answer(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("one ", "two"), hold=1))
    chat.send("count")
    until_said(chat, "one ")
    engine.die()
    until_idle(chat)
    assert chat.notice is not None
    assert "killed" in chat.notice
    assert (chat.messages[-1].content, chat.messages[-1].partial) == ("one ", True)
    assert chat.messages[-1].finish_reason == "died"
    engine.script(Script(pieces=("two",)))
    chat.continue_answer()  # starts it again
    until_idle(chat)
    assert shown(chat) == ["count", "one two"]


def test_switching_models_stops_the_answer_and_answers_next_questions(
    chat: Conversation, engine: ScriptedEngine
) -> None:
    engine.script(Script(pieces=("one ", "two ", "three"), hold=1))
    chat.send("count")
    until_said(chat, "one ")
    chat.set_model("org/other")
    until_idle(chat)
    assert (chat.messages[-1].content, chat.messages[-1].partial) == ("one ", True)
    assert (chat.messages[-1].finish_reason, chat.notice) == ("cancelled", None)
    assert (chat.session.model, engine.specs[-1].name) == ("org/other", "org/other")
    ask(chat, "go on", "fine")
    assert shown(chat)[-1] == "fine"


def test_a_servers_model_stays(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.is_remote = True
    before = chat.session.model, len(engine.specs)
    with pytest.raises(UsageError, match="server's model"):
        chat.set_model("org/other")
    assert (chat.session.model, len(engine.specs)) == before
    for name in ("", "no such model"):  # whatever its name
        with pytest.raises(UsageError, match="server's model"):
            chat.check_model(name)


def test_a_restart_stops_the_answer(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("one ", "two ", "three"), hold=1))
    chat.send("count")
    until_said(chat, "one ")
    engine.restart()
    until_idle(chat)
    assert (chat.messages[-1].content, chat.messages[-1].partial) == ("one ", True)
    assert (chat.messages[-1].finish_reason, chat.notice) == ("cancelled", None)
    ask(chat, "go on", "fine")


def test_an_unknown_model_changes_nothing(
    chat: Conversation, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    (tmp_path / "data" / "models" / "my-own").mkdir(parents=True)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    engine.script(Script(hold=2))
    chat.send("hm")
    chat.poll()
    for name, hint in (("smolm2-135m", "smollm2-135m"), ("my-onw", "my-own"), ("./gone", None), ("a/b c", "org/name")):
        with pytest.raises((UsageError, ModelNotFoundError)) as refused:
            chat.set_model(name)
        assert hint is None or hint in (refused.value.hint or "")
    assert (chat.session.model, chat.store.session(chat.session.id).model, len(engine.specs)) == (None, None, 1)
    assert (engine.state, chat.phase) == ("ready", "prefill")
    for name in ("smollm2-135m", "my-own", str(tmp_path / "m"), "org/name@main"):
        chat.set_model(name)
        assert engine.specs[-1].name == name


def test_a_message_sent_during_loading_is_answered(engine: ScriptedEngine, store: SessionStore) -> None:
    chat = Conversation(engine, store)
    chat.load_model()
    chat.send("early")
    until_idle(chat)
    assert shown(chat) == ["early", "Hello, world."]


def test_stopping_while_the_model_loads_does_not_wait_for_it(engine: ScriptedEngine, store: SessionStore) -> None:
    chat = Conversation(engine, store)
    chat.load_model()
    chat.send("early")
    chat.stop()
    assert chat.engine.state == "loading"
    until_idle(chat)
    chat.poll()
    assert shown(chat) == stored(chat) == ["early"]
    chat.continue_answer()
    until_idle(chat)
    assert shown(chat) == ["early", "Hello, world."]


def test_an_engine_crash_after_loading_does_not_end_a_later_answer(engine: ScriptedEngine, store: SessionStore) -> None:
    engine.load_failure = "the hub cannot be reached"
    chat = Conversation(engine, store)
    chat.load_model()
    chat.send("hello?")
    chat.poll()
    engine.load_failure = None
    engine.restart()
    engine.die()
    engine._backlog.insert(0, Ready(engine.card_to_load))  # heard together: a chat that was suspended meanwhile
    chat.poll()
    assert chat.notice is not None
    assert "killed" in chat.notice
    assert (chat.phase, shown(chat)) == ("idle", ["hello?"])


def test_a_question_before_the_engine_was_started_starts_it(engine: ScriptedEngine, store: SessionStore) -> None:
    chat = Conversation(engine, store)
    engine.script(Script(pieces=["Hello."]))
    chat.send("Hi")
    until_idle(chat)
    assert shown(chat) == ["Hi", "Hello."]
    assert len(engine.specs) == 1


def test_models_are_loaded_with_the_kv_that_was_asked_for(engine: ScriptedEngine, store: SessionStore) -> None:
    talk = Conversation(engine, store, spec=ModelSpec(context=600, kv="auto"))
    talk.load_model()
    assert (engine.specs[-1].context, engine.specs[-1].kv) == (600, "auto")


def test_a_model_that_cannot_be_loaded(engine: ScriptedEngine, store: SessionStore) -> None:
    engine.load_failure = "not enough memory"
    chat = Conversation(engine, store)
    chat.load_model()
    chat.poll()
    assert (chat.notice, engine.state) == ("not enough memory", "failed")
    with pytest.raises(EngineError):
        chat.send("hello?")


def test_a_question_that_waited_for_a_model_is_asked_when_one_can_be_loaded(
    engine: ScriptedEngine, store: SessionStore
) -> None:
    engine.load_failure = "the hub cannot be reached"
    chat = Conversation(engine, store)
    chat.load_model()
    chat.send("hello?")
    chat.poll()
    assert (chat.notice, chat.phase, engine.state) == ("the hub cannot be reached", "idle", "failed")
    engine.load_failure = None
    engine.restart()
    until_idle(chat)
    assert shown(chat) == ["hello?", "Hello, world."]
    chat.load_model()
    chat.poll()
    assert (chat.phase, len(engine.commands)) == ("idle", 2)


def test_blank_messages_and_a_second_answer_are_refused(chat: Conversation, engine: ScriptedEngine) -> None:
    for action in (chat.continue_answer, chat.regenerate, lambda: chat.send("  \n ")):
        with pytest.raises(UsageError):
            action()
    engine.script(Script(hold=2))
    chat.send("q")
    chat.poll()
    for busy in (chat.continue_answer, chat.regenerate, lambda: chat.send("x"), lambda: chat.edit(1, "x")):
        with pytest.raises(EngineError):
            busy()
    assert stored(chat) == ["q"]


def test_resuming_brings_everything_back(chat: Conversation, engine: ScriptedEngine, store: SessionStore) -> None:
    ask(chat, "q", "a", "b")
    tokens = chat.branch.context_tokens
    chat.close()
    again = Conversation(engine, store, store.find("last"))
    assert (shown(again), again.branch.context_tokens) == (["q", "ab"], tokens)


def test_leaving_keeps_the_partial_answer_and_drops_empty_sessions(
    chat: Conversation, engine: ScriptedEngine, store: SessionStore
) -> None:
    empty = Conversation(engine, store)
    empty.close()
    engine.script(Script(pieces=("one ", "two"), hold=1))
    chat.send("count")
    until_said(chat, "one ")
    chat.close()
    assert [entry.session.id for entry in store.sessions()] == [chat.session.id]
    answer = store.branch(chat.session.id)[-1]
    assert (answer.content, answer.partial, answer.finish_reason) == ("one ", True, "cancelled")
    late = Conversation(engine, store)
    assert any(isinstance(event, Done) for event in [e for _ in range(9) for e in late.poll()])
    assert late.messages == []  # the old answer's events change nothing here
    assert store.branch(chat.session.id)[-1] == answer


# --- the full context ----------------------------------------------------------------------------------------


def full_chat(chat: Conversation, engine: ScriptedEngine) -> None:
    """Make three turns, the last of which exceeds the context."""
    chat.branch.set_system("Be brief.")
    ask(chat, "q1", "a1")
    ask(chat, "q2", "a2")
    engine.script(Script(full=True))
    chat.send("q3")
    until_idle(chat)
    assert chat.trimming.question is not None
    assert (chat.trimming.question.tokens, chat.trimming.question.limit, chat.trimming.question.during_answer) == (
        513,
        512,
        False,
    )
    assert stored(chat)[-1] == "q3"


def test_questions_to_the_user_are_asked_in_order(chat: Conversation, engine: ScriptedEngine) -> None:
    assert chat.questions == []
    full_chat(chat, engine)
    chat.store.db.full = True
    context, disk = chat.questions
    assert [result for result, _, _ in context.answers] == ["drop", "summarise", "new"]
    assert str(chat.store.db.path) in disk.text
    context.resolve("drop")
    assert chat.phase != "idle"
    disk.resolve("unsaved")
    assert chat.store.unsaved is not None
    until_idle(chat)
    assert chat.questions == []


def test_dropped_turns_are_not_sent_and_stay_on_the_screen(chat: Conversation, engine: ScriptedEngine) -> None:
    full_chat(chat, engine)
    chat.resolve("drop")
    command = engine.commands[-1]
    assert command.drop_oldest
    assert len(command.messages) == 6
    engine._backlog.append(Dropped(command.id, 2))
    until_idle(chat)
    assert (chat.branch.not_sent, chat.trimming.question) == (2, None)
    assert shown(chat) == ["q1", "a1", "q2", "a2", "q3", "Hello, world."]  # nothing is lost on the screen
    ask(chat, "q4", "a4")
    assert [m["content"] for m in engine.commands[-1].messages][:3] == ["Be brief.", "q2", "a2"]


def test_a_summary_takes_the_place_of_older_turns(chat: Conversation, engine: ScriptedEngine) -> None:
    full_chat(chat, engine)
    engine.script(Script(pieces=("<think>\nhm\n</think>\n", "They said 1 and 2.")), Script(pieces=("a3",)))
    chat.resolve("summarise")
    assert chat.phase == "summarising"
    request = engine.commands[-1].messages
    assert [m["content"] for m in request][:5] == ["Be brief.", "q1", "a1", "q2", "a2"]
    assert "Summarise" in request[-1]["content"]
    until_idle(chat)
    assert shown(chat)[-1] == "a3"
    system, question = engine.commands[-1].messages
    assert system["content"].startswith(
        "Be brief.\n\nSummary of the conversation before this point:\nThey said 1 and 2."
    )
    assert (question["content"], chat.branch.not_sent) == ("q3", 4)


@pytest.mark.parametrize(("limit", "tokens"), [(600, 150), (8192, 512), (3, 1)])
def test_a_summary_is_limited_to_a_share_of_the_context(
    chat: Conversation, engine: ScriptedEngine, limit: int, tokens: int
) -> None:
    engine.card = engine.card_to_load = with_context(limit)
    ask(chat, "q1", "a1")
    engine.script(Script(full=True))
    chat.send("q2")
    until_idle(chat)
    chat.resolve("summarise")
    assert engine.commands[-1].options.max_tokens == tokens


@pytest.mark.parametrize(("taken", "said"), [(540, "540 of the context's 600 tokens are taken"), (700, "is full: 700")])
def test_a_summary_that_does_not_suffice_is_reported(
    chat: Conversation, engine: ScriptedEngine, taken: int, said: str
) -> None:
    full_chat(chat, engine)
    engine.script(Script(pieces=("They said 1 and 2.",)), Script(hold=4))
    chat.resolve("summarise")
    until_asked(chat, "waiting")
    engine.card = with_context(600)
    engine._backlog.append(ContextFull(engine.commands[-1].id, taken, 600))
    until_idle(chat)
    assert chat.notice is not None
    assert said in chat.notice
    assert "only the summary" in chat.notice
    assert chat.trimming.question is None


def test_turns_too_long_to_be_summarised_are_asked_about_again(chat: Conversation, engine: ScriptedEngine) -> None:
    full_chat(chat, engine)
    engine.script(Script(full=True))
    chat.resolve("summarise")
    until_idle(chat)
    assert chat.notice == "the older turns are too long to be summarised"
    chat.resolve("drop")
    until_idle(chat)
    assert shown(chat)[-1] == "Hello, world."


def test_a_stopped_summary_asks_again(chat: Conversation, engine: ScriptedEngine) -> None:
    full_chat(chat, engine)
    engine.script(Script(hold=1))
    chat.resolve("summarise")
    chat.poll()
    chat.stop()
    until_idle(chat)
    assert chat.trimming.question is not None
    assert (chat.branch.not_sent, stored(chat)[-1]) == (0, "q3")


def test_a_full_chat_continues_in_a_new_session(chat: Conversation, engine: ScriptedEngine) -> None:
    full_chat(chat, engine)
    old = chat.session.id
    chat.resolve("new")
    until_idle(chat)
    assert chat.session.id != old
    assert (shown(chat), chat.session.system, chat.trimming.question) == (["q3", "Hello, world."], "Be brief.", None)
    assert len(chat.store.branch(old)) == 5


def test_running_into_the_limit_asks_and_then_continues(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q1", "a1")
    engine.script(Script(pieces=("half",), reason="length", context_full=True), Script(pieces=(" and half",)))
    chat.send("q2")
    until_idle(chat)
    assert chat.trimming.question is not None
    assert chat.trimming.question.during_answer
    assert chat.messages[-1].partial
    chat.resolve("drop")
    assert (engine.commands[-1].begun.text, engine.commands[-1].drop_oldest) == ("half", True)
    until_idle(chat)
    assert shown(chat) == ["q1", "a1", "q2", "half and half"]


def test_dropping_turns_for_a_regeneration_keeps_its_question(chat: Conversation, engine: ScriptedEngine) -> None:
    ask(chat, "q1", "a1")
    ask(chat, "q2", "a2")
    engine.script(Script(full=True), Script(pieces=("a2 new",)))
    chat.regenerate()
    until_idle(chat)
    assert shown(chat)[-1] == "a2"
    chat.resolve("drop")
    assert engine.commands[-1].messages[-1] == {"role": "user", "content": "q2"}
    until_idle(chat)
    assert shown(chat) == ["q1", "a1", "q2", "a2 new"]


def test_a_single_message_longer_than_the_context_is_reported(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(full=True))
    chat.send("a whole book")
    until_idle(chat)
    assert chat.trimming.question is None
    assert chat.notice is not None
    assert "513 tokens" in chat.notice
    with pytest.raises(UsageError):
        chat.resolve("drop")


def test_attachments_are_sent_but_not_shown_as_text(chat: Conversation, engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n```py\n1\n```\n")
    message = chat.send(f"/file {tmp_path}/notes.md\nWhat does it say?")
    assert message.content == "What does it say?"
    sent = engine.commands[-1].messages[-1]["content"]
    assert sent == "File notes.md:\n````\n# Notes\n```py\n1\n```\n````\n\nWhat does it say?"
    with pytest.raises(EngineError):
        chat.send("x")
    until_idle(chat)
    with pytest.raises(UsageError, match="cannot be read"):
        chat.send("/file /nowhere/at/all.txt")
    assert len(stored(chat)) == 2


@pytest.mark.parametrize(
    ("asked", "edit", "names"),
    [
        ("/file A.md\nwhy?", "why not?", ["A.md"]),
        ("/file A.md\nwhy?", "why? see @B.md", ["A.md", "B.md"]),
        ("why? see @A.md", "why? see @A.md, @B.md", ["A.md", "B.md"]),
        ("why? see @A.md", "why? see @B.md", ["B.md"]),
        ("why? see @A.md and @B.md", "why? see @B.md", ["B.md"]),
        ("see @./A.md!", "just see @./A.md", ["A.md"]),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_an_edit_keeps_the_files_it_leaves_alone(
    chat: Conversation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    edit: str,
    names: list[str],
    gone: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("A.md", "B.md"):
        Path(name).write_text(name)
    chat.send(asked)
    until_idle(chat)
    Path("A.md").write_text("new")
    if gone:
        Path("A.md").unlink()
    chat.edit(chat.messages[0].id, edit)
    found = chat.messages[0].attachments
    assert [attachment.name for attachment in found] == names
    again = "A.md" in edit and not gone  # named once more, so read once more
    assert {a.name: a.text for a in found} == {name: "new" if name[0] == "A" and again else name for name in names}


def test_a_full_disk_is_reported_and_the_chat_continues(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=["water " * 500] * 80))
    chat.send("flood")
    pages = chat.store.db.rows("PRAGMA page_count")[0][0]
    chat.store.db.rows(f"PRAGMA max_page_count = {pages + 20}")
    until_idle(chat)
    assert chat.notice is not None
    assert "full" in chat.notice
    assert "\n" not in chat.notice
    assert shown(chat)[-1].startswith("water water")
    chat.store.db.rows("PRAGMA max_page_count = 100000")
    ask(chat, "and now?", "fine")
    assert shown(chat)[-1] == "fine"


@contextmanager
def nothing_fits(store: SessionStore, table: str) -> Iterator[None]:
    """Refuse new rows in this table, as on a full disk."""
    refuse = "SELECT RAISE(ABORT, 'database or disk is full')"
    store.db.run(f"CREATE TRIGGER refuse BEFORE INSERT ON {table} BEGIN {refuse}; END")
    yield
    store.db.run("DROP TRIGGER refuse")


@pytest.mark.parametrize("table", ["messages", "pieces"])
def test_an_unsaved_answer_is_stored_first(chat: Conversation, engine: ScriptedEngine, table: str) -> None:
    engine.script(Script(pieces=("It ", "is ", "high."), reason="length"), Script(pieces=(" And cold.",)))
    chat.send("How is it?")
    with nothing_fits(chat.store, table):
        until_idle(chat)
        for action in (chat.continue_answer, chat.regenerate, lambda: chat.send("what?")):
            with pytest.raises(SessionError, match="full"):
                action()
        assert chat.notice is not None
        assert "full" in chat.notice
    chat.continue_answer()
    until_idle(chat)
    assert shown(chat) == stored(chat) == ["How is it?", "It is high. And cold."]


@pytest.mark.parametrize("table", ["messages", "pieces"])
def test_an_unsaved_answer_is_stored_once_there_is_space(
    chat: Conversation, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.setattr("headrace.app.chat.turn.RETRY_S", 0.0)
    engine.script(Script(pieces=("It ", "is ", "high.")))
    chat.send("How is it?")
    with nothing_fits(chat.store, table):
        until_idle(chat)
        chat.poll()
        assert chat.notice is not None
    chat.poll()
    assert shown(chat) == stored(chat) == ["How is it?", "It is high."]
    assert (chat.messages[-1].finish_reason, chat.messages[-1].partial, chat.notice) == ("stop", False, None)


@pytest.mark.parametrize("table", ["messages", "pieces"])
def test_leaving_with_an_unsaved_answer_is_reported(chat: Conversation, engine: ScriptedEngine, table: str) -> None:
    engine.script(Script(pieces=("It ", "is ", "high.")))
    chat.send("How is it?")
    with nothing_fits(chat.store, table):
        until_idle(chat)
        for _ in range(2):
            with pytest.raises(SessionError, match="full"):
                chat.close()
    chat.close()
    assert stored(chat) == ["How is it?", "It is high."]


def test_leaving_an_answer_that_can_be_stored_keeps_the_notice(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("It ", "is ", "high."), hold=1))
    chat.send("How is it?")
    until_said(chat, "It is ")
    chat.notice = "tiny is damaged"
    chat.close()
    assert stored(chat) == ["How is it?", "It is "]
    assert chat.notice == "tiny is damaged"


def test_an_answer_continued_by_another_process_is_not_changed(
    chat: Conversation, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.script(Script(pieces=("one ",), reason="length"))
    chat.send("count")
    until_idle(chat)
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        other = Conversation(ScriptedEngine().script(Script(pieces=("two ", "three"), hold=1)), store, chat.session)
        other.load_model()
        other.continue_answer()
        until_said(other, "one two ")
        with pytest.raises(SessionError, match="another headrace"):
            chat.continue_answer()
        assert isinstance(other.engine, ScriptedEngine)
        other.engine.release()
        until_idle(other)
        with pytest.raises(SessionError, match="another headrace"):
            chat.continue_answer()
        assert stored(other) == ["count", "one two three"]
    assert (chat.phase, len(engine.commands)) == ("idle", 1)
    chat.regenerate()
    until_idle(chat)
    assert shown(chat) == ["count", "Hello, world."]


@pytest.mark.parametrize("what", ["session", "question", "answer"])
def test_an_answer_deleted_by_another_process_ends(
    chat: Conversation, engine: ScriptedEngine, tmp_path: Path, what: str
) -> None:
    ask(chat, "mill", "A waterwheel.")
    engine.script(Script(pieces=("It ", "is ", "high."), hold=1))
    chat.send("How is it?")
    until_said(chat, "It is ")
    with closing(SessionStore(tmp_path / "sessions.db")) as other:
        if what == "session":
            other.delete(chat.session.id)
        else:
            other.remove(other.message(chat.branch.last("user" if what == "question" else "assistant").id))
    engine.release()
    until_idle(chat)
    assert chat.notice is not None
    assert "deleted" in chat.notice
    if what == "session":
        with pytest.raises(DeletedError, match="session"):
            chat.send("and now?")
    else:
        left = ["mill", "A waterwheel."] + ["How is it?"] * (what == "answer")
        assert shown(chat) == stored(chat) == left
        ask(chat, "and now?", "fine")
        assert shown(chat) == stored(chat) == [*left, "and now?", "fine"]
    chat.close()


def test_a_question_on_a_branch_that_another_process_deleted_is_not_asked(
    chat: Conversation, engine: ScriptedEngine, tmp_path: Path
) -> None:
    ask(chat, "mill", "A waterwheel.")
    with closing(SessionStore(tmp_path / "sessions.db")) as other:
        other.remove(other.message(chat.branch.last("assistant").id))
    with pytest.raises(DeletedError, match="message"):
        chat.send("and?")
    assert len(engine.commands) == 1


def test_a_failed_store_is_retried_after_a_while(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("It ", "is ", "high."), hold=1))
    chat.send("How is it?")
    until_said(chat, "It ")
    with nothing_fits(chat.store, "pieces"):
        chat.poll()
        assert chat.notice is not None
        chat.notice = None
        chat.poll()
        assert chat.notice is None
    engine.release()
    until_idle(chat)
    assert stored(chat) == ["How is it?", "It is high."]


def test_steps_without_text_change_no_message(chat: Conversation, engine: ScriptedEngine) -> None:
    engine.script(Script(pieces=("", "", "x", "")))
    chat.send("q")
    events = until_idle(chat)
    assert sum(isinstance(event, Delta) for event in events) == 4
    assert shown(chat) == ["q", "x"]


def test_a_draft_is_prefetched_as_it_would_be_sent(engine: ScriptedEngine, chat: Conversation, tmp_path: Path) -> None:
    chat.prefetch("")
    assert not engine.ahead  # an empty conversation has nothing to read
    (tmp_path / "notes.md").write_text("the mill stands")
    chat.send("hello")
    chat.prefetch("while it answers")
    until_idle(chat)
    chat.prefetch("/file /nowhere/at/all.txt\nwhat?")
    assert not engine.ahead
    typed = f"/file {tmp_path}/notes.md\nWhat does it "
    chat.prefetch(typed)
    chat.prefetch("")
    chat.send(typed.rstrip())
    sent = [message["content"] for message in engine.commands[-1].messages]
    assert ahead(engine) == [sent, sent[:-1]]


def test_damaged_weights_are_reported_with_every_answer(engine: ScriptedEngine, chat: Conversation) -> None:
    engine._backlog.append(Damaged("tiny is damaged", "remove it"))
    chat.poll()
    assert chat.notice == "tiny is damaged (remove it)"
    for question in ("one", "two"):
        ask(chat, question, "answer")
        assert chat.notice == "tiny is damaged (remove it)"
    chat.load_model()
    chat.poll()
    assert chat.notice is None


def test_stored_settings_out_of_range_are_refused_before_anything_is_stored(
    engine: ScriptedEngine, store: SessionStore
) -> None:
    chat = Conversation(engine, store, store.create(sampling={"temperature": -1, "of_another_version": 1}))
    assert chat.effective["temperature"] == -1
    with pytest.raises(UsageError, match="temperature"):
        chat.send("Hi")
    assert (chat.messages, engine.commands) == ([], [])
    chat.branch.set_sampling({"temperature": 0.5})
    chat.send("Hi")
    assert engine.commands[-1].options.given() == {"temperature": 0.5}


def test_settings_of_a_model_that_is_not_loaded_are_unknown(chat: Conversation, engine: ScriptedEngine) -> None:
    assert "temperature" in chat.effective
    engine.die()
    chat.poll()
    assert chat.effective == {}
