"""The journal of an answer: what a killed chat leaves is in the store again, once, wherever the killing came."""

import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.app.sessions.journal import Answer, Journal, JournalWriter, fold_abandoned
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError

pieces = st.lists(st.text(st.characters(exclude_categories=()), max_size=4), max_size=8)  # NUL, surrogates, all planes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


def asked(store: SessionStore, *, begins: str | None = None) -> Answer:
    """Whose journal an answer to a new question has; `begins`: one that is continued."""
    session = store.create()
    question = store.add(session.id, None, "user", "How is the river?")
    if begins is None:
        return Answer(session.id, store.reserve_message(), question.id, "m")
    said = store.add(session.id, question.id, "assistant", begins, model="m")
    store.reopen(said.id)
    return Answer(session.id, said.id, question.id, "m", len(begins))


def write(journal: Journal, *texts: str) -> None:
    engine = JournalWriter(str(journal.path))
    for text in texts:
        engine.write(text)
    engine.close()


def left_behind(store: SessionStore, answer: Answer, *texts: str) -> Path:
    """The journal that a killed chat leaves."""
    journal = Journal(store.journals, answer)
    write(journal, *texts)
    journal.abandon()
    return journal.path


def answer_in(store: SessionStore, answer: Answer) -> str:
    message = store.branch(answer.session_id)[-1]
    assert (message.id, message.parent_id, message.model) == (answer.message_id, answer.parent_id, "m")
    assert message.finish_reason is None
    return message.content


def test_an_answer_that_was_never_begun_is_made(store: SessionStore) -> None:
    answer = asked(store)
    path = left_behind(store, answer, "It ", "is ", "high.")
    store.recover(answer.session_id)
    assert answer_in(store, answer) == "It is high."
    assert store.branch(answer.session_id)[-1].partial
    assert [hit.message_id for hit in search(store, "high")] == [answer.message_id]
    assert not path.exists()


def test_opening_the_store_is_enough(store: SessionStore, tmp_path: Path) -> None:
    answer = asked(store, begins="It ")
    left_behind(store, answer, "is ", "high.")
    other = SessionStore(tmp_path / "sessions.db")
    assert answer_in(other, answer) == "It is high."
    other.close()


def test_what_a_living_chat_writes_is_left_alone(store: SessionStore) -> None:
    answer = asked(store)
    journal = Journal(store.journals, answer)
    write(journal, "It is")
    fold_abandoned(store, store.journals)
    assert len(store.messages(answer.session_id)) == 1
    assert journal.text() == "It is"
    journal.remove()
    assert list(store.journals.iterdir()) == []


def test_opening_the_store_waits_for_another_that_is_folding(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asked(store)
    left_behind(store, answer, "It is high.")
    folding, append = threading.Event(), SessionStore.append

    def slowly(self: SessionStore, message_id: int, text: str) -> None:
        folding.set()
        time.sleep(0.2)
        append(self, message_id, text)

    monkeypatch.setattr(SessionStore, "append", slowly)
    first = threading.Thread(target=lambda: SessionStore(tmp_path / "sessions.db").close())
    first.start()
    folding.wait()
    second = SessionStore(tmp_path / "sessions.db")
    assert answer_in(second, answer) == "It is high."
    second.close()
    first.join()


def test_a_finished_message_a_deleted_session_and_an_empty_journal_leave_nothing(store: SessionStore) -> None:
    finished, deleted, silent = asked(store), asked(store), asked(store)
    for answer in (finished, deleted):
        left_behind(store, answer, "and so on")
    left_behind(store, silent)
    message = store.begin_answer(finished.session_id, finished.parent_id or 0, "m", finished.message_id)
    store.finish(message.id, "cancelled", partial=True)
    store.delete(deleted.session_id)
    (store.journals / "half-made.journal").write_text('{"session_id": "')
    fold_abandoned(store, store.journals)
    assert store.message(finished.message_id).content == ""
    assert len(store.messages(silent.session_id)) == 1
    assert list(store.journals.iterdir()) == []


def test_a_reserved_message_is_nobody_elses(store: SessionStore) -> None:
    answer = asked(store)
    other = store.add(answer.session_id, answer.parent_id, "assistant", "another")
    assert other.id > answer.message_id
    with pytest.raises(SessionError):
        store.message(answer.message_id)


def test_a_store_that_can_only_be_read_opens_and_keeps_its_journals(store: SessionStore, tmp_path: Path) -> None:
    path = left_behind(store, asked(store), "It is")
    store.db.run("CREATE TRIGGER refuse BEFORE INSERT ON messages BEGIN SELECT RAISE(ABORT, 'readonly'); END")
    SessionStore(tmp_path / "sessions.db").close()
    assert path.exists()


def test_a_journal_that_cannot_be_written_costs_the_engine_nothing(tmp_path: Path) -> None:
    for path in (None, str(tmp_path / "nowhere" / "x.journal"), "/dev/full"):
        engine = JournalWriter(path)
        engine.write("text")
        engine.write("more")
        engine.close()


def test_a_long_answer_gets_more_room(store: SessionStore) -> None:
    answer = asked(store)
    pieces = ["The river is high. " * 500, "🙂" * 20_000, "a", "字" * 70_000]
    path = left_behind(store, answer, *pieces)
    assert path.stat().st_size > len("".join(pieces).encode())
    fold_abandoned(store, store.journals)
    assert answer_in(store, answer) == "".join(pieces)


def test_another_writer_goes_on_where_the_first_was_killed(store: SessionStore) -> None:
    journal = Journal(store.journals, asked(store))
    killed = JournalWriter(str(journal.path))
    killed.write("It is ")
    write(journal, "high.")
    assert journal.text() == "It is high."
    journal.remove()


def test_a_full_disk_ends_the_journal_not_the_engine(store: SessionStore) -> None:
    journal = Journal(store.journals, asked(store))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        write(journal, "It is high. ", "x" * 80_000, "never without its middle", "y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert journal.text() == "It is high. "
    journal.remove()


class _Killed(BaseException):
    """The process is gone at this point."""


@settings(max_examples=60, deadline=None)
@given(
    before=st.none() | st.just("It is"),
    said=pieces,
    saved=st.integers(0, 8),
    kills=st.lists(st.sampled_from(("begin_answer", "append", "unlink")), max_size=3),
    after=st.booleans(),
    cut=st.integers(0, 3),
)
def test_any_kills_before_and_while_folding_lose_nothing_and_double_nothing(
    before: str | None, said: list[str], saved: int, kills: list[str], after: bool, cut: int
) -> None:
    """kills: where one folding after the other ends, `after` or before the step. cut: bytes that were not written."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        store = SessionStore(Path(folder) / "sessions.db")
        answer = asked(store, begins=before)
        path = left_behind(store, answer, *said)
        head, newline, text = path.read_bytes().rstrip(b"\0").partition(b"\n")
        written = text[: max(0, len(text) - cut)]
        path.write_bytes((head + newline + written).ljust(path.stat().st_size, b"\0"))
        whole = written.decode("utf-8", "ignore")
        if (stored := whole[: len("".join(said[:saved]))]) and saved:  # what the chat had put into the store
            if before is None:
                store.begin_answer(answer.session_id, answer.parent_id or 0, "m", answer.message_id)
            store.grow(answer.message_id, stored)
        for kill in kills:
            with patch.context() as inner, suppress(_Killed):
                target = Path if kill == "unlink" else SessionStore
                inner.setattr(target, kill, _dying(getattr(target, kill), after=after))
                fold_abandoned(store, store.journals)
        fold_abandoned(store, store.journals)
        fold_abandoned(store, store.journals)
        if before is not None or whole:
            assert answer_in(store, answer) == (before or "") + whole
        else:
            assert len(store.messages(answer.session_id)) == 1
        assert list(store.journals.iterdir()) == []
        store.close()


def _dying(step, *, after: bool):  # type: ignore[no-untyped-def]
    def dies(*args, **kwargs):  # type: ignore[no-untyped-def]
        if after:
            step(*args, **kwargs)
        raise _Killed

    return dies
