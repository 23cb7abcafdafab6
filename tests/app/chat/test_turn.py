"""One generation of a chat: what is stored of its deltas."""

from headrace.app.chat.turn import Turn
from headrace.app.engine.events import Delta
from headrace.app.sessions.store import SessionStore
from headrace.models.text.events import Completed
from headrace.runtime.engine.request import Finished
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
    answer = store.branch(question.session_id)[-1]
    assert answer.content == "<think>\nhm\n</think>\n\nSo it is."
    assert store.steps(answer) is None, "no step is known by its text"


def test_text_of_the_engine_is_stored_as_it_is(store: SessionStore) -> None:
    question = store.add(store.create().id, None, "user", "Why?")
    turn = Turn(store, question)
    event = delta(turn.id, "<think>hm</think>So.", thinking="hm", content="So.")
    turn.handle(event)
    turn.end("stop", make_summary())
    assert store.branch(question.session_id)[-1].content == "<think>hm</think>So."
