"""One generation of a chat: what is stored of its deltas."""

import pytest

from headrace.app.chat.turn import Turn
from headrace.app.engine.events import Abandoned, ContextFull, Delta, Done, Failed
from headrace.app.sessions.store import SessionStore
from headrace.models.text.events import Completed
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import SessionError
from tests.support.deltas import delta
from tests.support.summaries import make_summary


def test_an_answer_that_came_by_kind_is_stored_with_tags(store: SessionStore) -> None:
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    end = Finished("stop", make_summary())
    for thinking, content in (("h", ""), ("m", "So "), ("", "it is.")):
        event = Delta(turn.id, [Completed(thinking + content, end, thinking, content)], by_kind=True)
        turn.handle(event)
    turn.end("stop", end.summary)
    turn.settle()
    answer = store.branch(question.session_id)[-1]
    assert answer.content == "<think>\nhm\n</think>\n\nSo it is."
    assert store.steps(answer) is None, "no step is known by its text"


def test_the_engines_text_is_stored_unchanged(store: SessionStore) -> None:
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    event = delta(turn.id, "<think>hm</think>So.", thinking="hm", content="So.")
    turn.handle(event)
    turn.handle(Done(turn.id, Finished("stop", make_summary())))
    turn.settle()
    assert store.branch(question.session_id)[-1].content == "<think>hm</think>So."


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
