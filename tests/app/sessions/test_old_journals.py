"""Journals of answers that an earlier version left: in the store again, once, wherever it or the folding was killed."""

import fcntl
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.app.sessions.database import Database, storable
from headrace.app.sessions.old_journals import Answer, fold_old_journals
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore

NOT_MADE = 77  # the id that the answer's message was to have
pieces = st.lists(st.text(st.characters(exclude_categories=()), max_size=4), max_size=8)  # NUL, surrogates, all planes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


def folder(store: SessionStore) -> Path:
    return store.db.path.with_suffix(".journals")


def fold(store: SessionStore) -> None:
    fold_old_journals(store.db, folder(store))


def asked(store: SessionStore, *, begins: str | None = None, message_id: int = NOT_MADE) -> Answer:
    """Whose journal an answer to a new question has; `begins`: one that is continued."""
    session = store.create()
    question = store.add(session.id, None, "user", "How is the river?")
    if begins is None:
        return Answer(session.id, message_id, question.id, "m")
    said = store.add(session.id, question.id, "assistant", begins, model="m")
    store.reopen(said)
    return Answer(session.id, said.id, question.id, "m", len(begins))


def left_behind(store: SessionStore, answer: Answer, *texts: str) -> Path:
    """The journal that a killed chat left."""
    folder(store).mkdir(exist_ok=True)
    path = folder(store) / f"{answer.session_id}-{answer.message_id}-0123abcd.journal"
    path.write_bytes(json.dumps(asdict(answer)).encode() + b"\n" + storable("".join(texts)).encode() + bytes(100))
    return path


def answer_in(store: SessionStore, answer: Answer) -> str:
    message = store.branch(answer.session_id)[-1]
    assert (message.id, message.parent_id, message.model) == (answer.message_id, answer.parent_id, "m")
    assert message.finish_reason is None
    assert message.partial or answer.begins
    return message.content


def test_an_answer_that_was_never_begun_is_made(store: SessionStore) -> None:
    answer = asked(store)
    left_behind(store, answer, "It ", "is ", "high.")
    fold(store)
    assert answer_in(store, answer) == "It is high."
    store.recover(answer.session_id)
    assert [hit.message_id for hit in search(store, "high")] == [answer.message_id]
    assert not folder(store).exists()


def test_opening_the_store_is_enough(store: SessionStore, tmp_path: Path) -> None:
    answer = asked(store, begins="It ")
    left_behind(store, answer, "is ", "high.")
    other = SessionStore(tmp_path / "sessions.db")
    assert answer_in(other, answer) == "It is high."
    other.close()


def test_what_a_living_chat_of_that_version_writes_is_left_alone(store: SessionStore) -> None:
    answer = asked(store)
    path = left_behind(store, answer, "It is")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fold(store)
    assert len(store.messages(answer.session_id)) == 1
    assert path.exists()


def test_a_finished_message_a_deleted_session_and_an_empty_journal_leave_nothing(store: SessionStore) -> None:
    deleted, silent = asked(store), asked(store, message_id=NOT_MADE + 1)
    finished = asked(store, begins="")
    store.finish(finished.message_id, "cancelled", partial=True)
    for answer in (finished, deleted):
        left_behind(store, answer, "and so on")
    left_behind(store, silent)
    store.delete(deleted.session_id)
    (folder(store) / "half-made.journal").write_text('{"session_id": "')
    fold(store)
    assert store.message(finished.message_id).content == ""
    assert len(store.messages(silent.session_id)) == 1
    assert not folder(store).exists()


def test_what_is_no_journal_stays(store: SessionStore, tmp_path: Path) -> None:
    folder(store).mkdir()
    (folder(store) / "notes.journal").write_text("monday\nsunny")
    SessionStore(tmp_path / "sessions.db").close()
    assert (folder(store) / "notes.journal").exists()


def test_a_store_that_can_only_be_read_opens_and_keeps_its_journals(store: SessionStore, tmp_path: Path) -> None:
    path = left_behind(store, asked(store), "It is")
    store.db.run("CREATE TRIGGER refuse BEFORE INSERT ON messages BEGIN SELECT RAISE(ABORT, 'readonly'); END")
    SessionStore(tmp_path / "sessions.db").close()
    assert path.exists()


class _Killed(BaseException):
    """The process is gone at this point."""


@settings(max_examples=60, deadline=None)
@example(before=None, said=["\x80"], saved=0, kills=[], after=False, cut=1)
@given(
    before=st.none() | st.just("It is"),
    said=pieces,
    saved=st.integers(0, 8),
    kills=st.lists(st.sampled_from((Database.run, Path.unlink)), max_size=3),
    after=st.booleans(),
    cut=st.integers(0, 3),
)
def test_any_kills_before_and_while_folding_lose_nothing_and_double_nothing(
    before: str | None, said: list[str], saved: int, kills: list[object], after: bool, cut: int
) -> None:
    """kills: where one folding after the other ends, `after` or before the step. cut: bytes that were not written."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        store = SessionStore(Path(place) / "sessions.db")
        answer = asked(store, begins=before)
        path = left_behind(store, answer, *said)
        head, newline, text = path.read_bytes().rstrip(b"\0").partition(b"\n")
        written = text[: max(0, len(text) - cut)]
        path.write_bytes((head + newline + written).ljust(path.stat().st_size, b"\0"))
        whole = written.decode("utf-8", "ignore")
        if (stored := whole[: len("".join(said[:saved]))]) and saved:  # what the chat had put into the store
            if before is None:
                made = store.begin_answer(answer.session_id, answer.parent_id or 0, "m")
                store.db.run("UPDATE sessions SET active_leaf = NULL")
                store.db.run("UPDATE messages SET id = ? WHERE id = ?", answer.message_id, made.id)
                store.db.run("UPDATE sessions SET active_leaf = ?", answer.message_id)
            store.grow(answer.message_id, stored)
        for kill in kills:
            owner, name = (Path, "unlink") if kill is Path.unlink else (Database, "run")
            with patch.context() as inner, suppress(_Killed):
                inner.setattr(owner, name, _dying(kill, after=after))
                fold(store)
        fold(store)
        fold(store)
        if before is not None or whole:
            assert answer_in(store, answer) == (before or "") + whole
        else:
            assert len(store.messages(answer.session_id)) == 1
        assert not folder(store).exists()
        store.close()


def _dying(step, *, after: bool):  # type: ignore[no-untyped-def]
    def dies(*args, **kwargs):  # type: ignore[no-untyped-def]
        if after:
            step(*args, **kwargs)
        raise _Killed

    return dies
