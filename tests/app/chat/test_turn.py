"""One generation of a chat: what is stored of its deltas."""

import pytest
from msgspec.structs import replace

from headrace.app.chat.turn import Turn
from headrace.app.engine.events import Abandoned, ContextFull, Delta, Done, Failed
from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from headrace.models.text.thinking import Kinds
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import SessionError
from tests.support.deltas import delta
from tests.support.summaries import make_summary


def stored(store: SessionStore, *deltas: Delta) -> Message:
    """Store an answer of these deltas, which a model ended, and read it."""
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    for each in deltas:
        turn.handle(each)
    turn.handle(Done(turn.id, Finished("stop", make_summary())))
    turn.settle()
    return store.branch(question.session_id)[-1]


def test_an_answer_of_a_server_has_no_steps(store: SessionStore) -> None:
    answer = stored(store, replace(delta(1, "So it is."), has_steps=False))
    assert answer.content == "So it is."
    assert store.steps(answer) is None, "no step is known by its text"


def test_an_answer_is_stored_as_the_model_wrote_it_with_its_kinds(store: SessionStore) -> None:
    text = delta(1, "<think>hm</think>So.", opening="<think>", thinking="hm", closing="</think>", content="So.")
    answer = stored(store, text)
    assert answer.content == "<think>hm</think>So."
    assert answer.kinds == Kinds(7, 2, 8, 3)
    assert (answer.by_kind.thinking, answer.by_kind.content) == ("hm", "So.")


def test_content_that_looks_like_thinking_stays_content(store: SessionStore) -> None:
    answer = stored(store, delta(1, "<think>is a tag</think>"))
    assert (answer.by_kind.thinking, answer.by_kind.content) == (None, "<think>is a tag</think>")


def test_an_answer_without_kinds_is_read_by_its_tags(store: SessionStore) -> None:
    """A killed headrace stored it, or it is damaged."""
    answer = stored(store, delta(1, "<think>hm</think>So.", opening="<think>", thinking="hm", closing="</think>"))
    for change in ("kinds = NULL", "content = content || ' More.'", "kinds = '[0, 0, 0, 1]'"):
        store.db.run(f"UPDATE messages SET {change} WHERE id = ?", answer.id)
        assert store.message(answer.id).by_kind.thinking == "hm"
        assert store.message(answer.id).by_kind.content.startswith("So.")


def test_undecided_text_counts_as_the_open_section(store: SessionStore) -> None:
    answer = stored(store, delta(1, "<think>\nhm</thi", opening="<think>\n", thinking="hm"))
    assert (answer.by_kind.thinking, answer.by_kind.is_open) == ("hm</thi", True)


def test_continued_thinking_keeps_its_line_breaks(store: SessionStore) -> None:
    leaf = stored(store, delta(1, "<think>\nhm\n", opening="<think>\n", thinking="hm"))
    turn = Turn(store, leaf, continuing=True)
    turn.handle(delta(turn.id, "\nmm</think>So.", opening="\n", thinking="mm", closing="</think>", content="So."))
    turn.end("stop")
    turn.settle()
    answer = store.message(leaf.id).by_kind
    assert (answer.thinking, answer.content) == ("hm\n\nmm", "So.")


def test_an_end_that_cannot_be_stored_is_tried_again(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    turn.handle(delta(turn.id, "So."))
    turn.end("cancelled")

    def full(*_: object, **__: object) -> None:
        raise SessionError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "grow", full)
        with pytest.raises(SessionError):
            turn.settle()
        assert (turn.is_stored, turn.retry_due) == (False, False)
        turn.save()  # not due: no error
    turn.save()
    assert not turn.is_stored
    turn.settle()
    answer = store.branch(question.session_id)[-1]
    assert (turn.is_stored, answer.content, answer.finish_reason) == (True, "So.", "cancelled")


@pytest.mark.parametrize("ending", ["failed", "length", "cancelled"])
def test_an_answer_that_ended_without_text_is_no_message(store: SessionStore, ending: str) -> None:
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    turn.handle({
        "failed": Failed(turn.id, "no memory", None),
        "length": ContextFull(turn.id, 9, 8),
        "cancelled": Abandoned(turn.id),
    }[ending])  # fmt: skip
    turn.settle()
    assert (turn.reason, turn.answer) == (ending, None)
    assert store.branch(question.session_id) == [question]
