"""The session store: sessions, messages, two processes, invalid files."""

import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.app.answer.answer_steps import AnswerSteps, StepText
from headrace.app.sessions.database import VERSION
from headrace.app.sessions.records import Attachment, Draft
from headrace.app.sessions.search import best_line, search
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError, SessionError, UnknownSessionError, UsageError
from tests.support.summaries import make_summary

METRICS = make_summary()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


def answered(store: SessionStore, session_id: str, question: str, answer: str, parent: int | None = None) -> int:
    """Add a question and its answer below `parent`; return the answer's id."""
    asked = store.add(session_id, parent, "user", question)
    said = store.begin_answer(session_id, asked.id, "m")
    store.grow(said.id, answer)
    return store.finish(said.id, "stop", METRICS).id


def test_session_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with closing(SessionStore(tmp_path / "sessions.db")) as store:
            store.create()
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("sessions.db*")}
    finally:
        os.umask(before)
    assert modes.keys() == {"sessions.db", "sessions.db-wal", "sessions.db-shm"}
    assert set(modes.values()) == {0o600}, modes


def test_stored_messages_are_read_again(store: SessionStore, tmp_path: Path) -> None:
    session = store.create(model="m", system="Be brief.", sampling={"temperature": 0.5, "stop": ["X"]})
    file = Attachment("notes.txt", "one\ntwo")
    asked = store.add(session.id, None, "user", "What is it?\nTell me.", attachments=[file])
    said = store.begin_answer(session.id, asked.id, "m")
    for piece in ("It ", "is ", "that.\n"):
        store.grow(said.id, piece)
        assert store.message(said.id).partial
    store.finish(said.id, "stop", METRICS)
    other = SessionStore(tmp_path / "sessions.db")
    found = other.session(session.id)
    assert (found.model, found.system, found.sampling) == ("m", "Be brief.", {"temperature": 0.5, "stop": ["X"]})
    assert found.title == "What is it?"
    first, second = other.branch(session.id)
    assert (first.content, first.attachments, first.role) == ("What is it?\nTell me.", (file,), "user")
    assert (second.content, second.partial, second.finish_reason) == ("It is that.\n", False, "stop")
    assert (second.metrics, second.model, second.parent_id) == (METRICS, "m", asked.id)
    other.close()


def test_branches_are_alternatives_and_switching_goes_to_the_newest_leaf(store: SessionStore) -> None:
    session = store.create()
    first = answered(store, session.id, "a", "1")
    second = answered(store, session.id, "b", "2", parent=first)
    asked = store.message(second).parent_id
    assert asked is not None
    again = store.begin_answer(session.id, asked, None)
    store.finish(again.id, "stop")
    edited = store.add(session.id, first, "user", "b, better")
    assert store.alternatives(store.message(asked)) == [asked, edited.id]
    assert store.alternatives(store.message(second)) == [second, again.id]
    assert [m.id for m in store.branch(session.id)][-1] == edited.id
    store.activate(store.message(asked))
    assert [m.id for m in store.branch(session.id)][-2:] == [asked, again.id]
    store.activate(store.message(second))
    assert store.session(session.id).active_leaf == second


def test_continuing_appends_to_the_stored_answer(store: SessionStore) -> None:
    session = store.create()
    asked = store.add(session.id, None, "user", "go")
    said = store.begin_answer(session.id, asked.id, None)
    store.grow(said.id, "one, ")
    assert store.finish(said.id, "cancelled", METRICS, partial=True).partial
    store.reopen(store.message(said.id))
    store.grow(said.id, "two")
    assert store.message(said.id).metrics is None
    whole = store.finish(said.id, "stop", METRICS)
    assert (whole.content, whole.partial, whole.metrics) == ("one, two", False, METRICS)


def test_sessions_are_listed_found_renamed_and_deleted(store: SessionStore) -> None:
    empty = store.create()
    ids = [store.create().id for _ in range(3)]
    for session_id in ids:
        answered(store, session_id, f"hello from {session_id}", "hi")
    assert [entry.session.id for entry in store.sessions()] == ids[::-1]
    assert [entry.messages for entry in store.sessions(limit=2)] == [2, 2]
    assert empty.id not in {entry.session.id for entry in store.sessions()}
    assert store.find("last").id == ids[-1]
    assert store.find(ids[0][:6]).id == ids[0]
    assert store.rename(ids[0], "  greetings ").title == "greetings"
    store.delete(ids[0])
    assert search(store, ids[0]) == []
    for missing in (ids[0], "%", "", "zz"):
        with pytest.raises(SessionError):
            store.find(missing)


def test_an_ambiguous_id_is_refused(store: SessionStore) -> None:
    firsts = [store.create().id[0] for _ in range(40)]
    with pytest.raises(SessionError):
        store.find(max(firsts, key=firsts.count))


def test_an_answer_is_reopened_once_only(store: SessionStore) -> None:
    session = store.create()
    question = store.add(session.id, None, "user", "q")
    answer = store.begin_answer(session.id, question.id, "m")
    seen = store.finish(answer.id, "cancelled", partial=True)
    store.reopen(seen)
    with pytest.raises(SessionError):
        store.reopen(seen)


def test_empty_sessions_are_not_resumed_and_are_deleted(store: SessionStore) -> None:
    spoken = store.create()
    answered(store, spoken.id, "q", "a")
    empty = store.create()
    assert store.find("last").id == spoken.id
    store.create()
    assert store.session(empty.id) == empty
    store.db.run("UPDATE sessions SET updated_at = 0")
    store.create()
    assert store.session(spoken.id).id == spoken.id
    with pytest.raises(SessionError):
        store.session(empty.id)


def test_a_chat_of_1500_messages_is_deleted(store: SessionStore) -> None:
    session = store.create()
    parent = None
    for i in range(1500):  # deeper than SQLite lets triggers and cascades nest
        parent = store.add(session.id, parent, "user", str(i), partial=True).id
    assert len(store.branch(session.id)) == 1500
    store.delete(session.id)
    assert store.messages(session.id) == []
    with pytest.raises(SessionError):
        store.session(session.id)


def test_search_finds_words_prefixes_accents_and_scripts_without_spaces(store: SessionStore) -> None:
    session = store.create()
    answered(store, session.id, "Où est le café?", "Near the *headrace* of the mill: `foo_bar(1) == 50%`.")
    answered(store, session.id, "今日は天気がいいですね", 'He said "AND" and NOT')
    for text in (
        "cafe",
        "CAFÉ",
        "headr mill",
        "foo_bar",
        "天気がいい",
        '"and"',
        "NOT",
        "50%",
        "le ou",
        "NEAR(",
        "*",
        "_",
    ):
        assert len(search(store, text)) == 1, text
    for text in ("caferace", "mill absent", "%%", "", "  ", "'", "x OR y", "; DROP TABLE messages"):
        assert search(store, text) == [], text
    assert "«headrace»" in search(store, "headrace")[0].snippet


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cafe", "Un CAFÉ à Köln."),
        ("koln", "Un CAFÉ à Köln."),
        ("art", "Art is here."),
        ("alpha omega", "From alpha to omega."),
        ('"omega alpha."', "From alpha to omega."),
        ("河流", "水車在河流旁邊。"),
        ("nowhere", None),
        ("", None),
    ],
)
def test_the_line_of_a_hit_is_the_one_that_holds_the_words(text: str, line: str | None) -> None:
    lines = ["The start of the smart party.", "Only alpha.", "Un CAFÉ à Köln.", "From alpha to omega.", "Art is here."]
    lines.append("水車在河流旁邊。")
    assert best_line(lines, text) == (None if line is None else lines.index(line))


def test_search_omits_deleted_text_and_finds_text_of_a_crashed_answer(store: SessionStore) -> None:
    session = store.create()
    asked = store.add(session.id, None, "user", "question")
    said = store.begin_answer(session.id, asked.id, None)
    store.grow(said.id, "unfinished symphony")
    assert search(store, "symphony") == []
    assert store.message(said.id).content == "unfinished symphony"
    store.recover(session.id)
    assert [hit.message_id for hit in search(store, "symphony")] == [said.id]
    assert store.message(said.id).partial
    store.delete(session.id)
    assert search(store, "symphony") == search(store, "question") == []


def test_several_processes_write_without_losing_messages(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sessions.db"
    script = (
        "import sys; from pathlib import Path; from headrace.app.sessions.store import SessionStore\n"
        "store = SessionStore(Path(sys.argv[1])); session = store.create(); parent = None\n"
        "for i in range(60):\n"
        "    parent = store.add(session.id, parent, 'user', str(i)).id\n"
        "    store.grow(parent, '!'); store.finish(parent, 'stop')\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, str(path)], stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[1] for process in both] == [b""] * 3
    store = SessionStore(path)
    assert [entry.messages for entry in store.sessions()] == [60] * 3
    for entry in store.sessions():
        assert [m.content for m in store.branch(entry.session.id)] == [f"{i}!" for i in range(60)]
    store.close()


def test_a_writer_waits_for_the_other(store: SessionStore, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, lambda: other.execute("COMMIT")).start()
    session = store.create()
    assert store.session(session.id) == session
    other.close()


def test_a_failed_transaction_changes_nothing(store: SessionStore) -> None:
    session = store.create()
    with pytest.raises(SessionError, match="CHECK constraint"):
        store.add(session.id, None, "oracle", "mill")  # type: ignore[arg-type]
    with pytest.raises(DeletedError):
        store.add(session.id, 999, "user", "below nothing")
    assert store.messages(session.id) == []
    assert store.session(session.id).active_leaf is None
    answered(store, session.id, "and on", "it goes")


def test_a_session_deleted_elsewhere_exits_with_1(store: SessionStore) -> None:
    session = store.create()
    message = store.add(session.id, None, "user", "hi")
    store.delete(session.id)
    with pytest.raises(DeletedError) as deleted:
        store.grow(message.id, "more", durable=False)
    assert deleted.value.exit_code == 1
    with pytest.raises(UnknownSessionError) as unknown:
        store.session(session.id)
    assert unknown.value.exit_code == 2


def test_nul_and_surrogate_characters_are_replaced(store: SessionStore) -> None:
    session = store.create(system="\udcff")
    said = store.add(session.id, None, "user", "be\0fore")
    store.grow(said.id, "\0after\ud800")
    assert store.finish(said.id, "stop").content == "be\ufffdfore\ufffdafter?"
    assert store.session(session.id).system == "?"


@pytest.mark.parametrize(
    ("version", "words", "hint"),
    [(1, "older version", "move the file away"), (VERSION + 1, "newer version", "update headrace")],
)
def test_foreign_files_and_databases_of_other_versions_are_refused(
    tmp_path: Path, version: int, words: str, hint: str
) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(SessionError, match="not a database"):
        SessionStore(broken)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(SessionError, match=words) as refused:
        SessionStore(other)
    assert (refused.value.hint or "").startswith(hint)
    (tmp_path / "file").touch()
    with pytest.raises(SessionError):
        SessionStore(tmp_path / "file" / "sessions.db")


@pytest.mark.parametrize(
    ("content", "title"), [("", "a.txt, b.txt"), (" \n\x1b\n Hi \n", "Hi"), ("\u200b\n", "a.txt, b.txt")]
)
def test_no_title_is_blank(store: SessionStore, content: str, title: str) -> None:
    session = store.create()
    store.add(session.id, None, "user", content, attachments=[Attachment("a.txt", "x"), Attachment("b.txt", "y")])
    assert store.session(session.id).title == title
    with pytest.raises(UsageError, match="title"):
        store.rename(session.id, " \t")


def test_a_removed_message_is_not_sent(store: SessionStore) -> None:
    session = store.create()
    first = store.add(session.id, None, "user", "needle")
    assert store.session(session.id).title == "needle"
    store.take_back(first)
    assert (store.session(session.id).title, store.branch(session.id), search(store, "needle")) == ("", [], [])
    answer = answered(store, session.id, "q", "a")
    store.take_back(store.add(session.id, answer, "user", "more"))
    assert [message.content for message in store.branch(session.id)] == ["q", "a"]
    assert store.session(session.id).title == "q"


def test_a_full_disk_is_not_reported_as_damage(store: SessionStore, tmp_path: Path) -> None:
    answered(store, store.create().id, "q", "a")
    store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(SessionError) as refused:
            SessionStore(tmp_path / "sessions.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.hint is not None
    assert "make room on the disk" in refused.value.hint
    assert "away" not in refused.value.hint


def test_a_durable_commit_leaves_nothing_in_a_macs_drive_cache(store: SessionStore) -> None:
    assert store.db.rows("PRAGMA fullfsync")[0][0] == 1


def test_a_draft_is_kept_and_listed(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = store.create()
    session = store.create()
    draft = Draft("see [1]", {"[1]": "a\ud800\0b"})
    store.set_draft(session.id, draft)
    assert store.session(session.id).draft == Draft("see [1]", {"[1]": "a?\0b"})
    assert [(entry.title, entry.messages) for entry in store.sessions()] == [("unsent: see [1]", 0)]
    assert store.find("last", drafts=True).id == session.id
    with pytest.raises(SessionError):
        store.find("last")
    monkeypatch.setattr(time, "time", lambda: session.created_at + 1e6)
    store.create()
    assert store.session(session.id)
    with pytest.raises(DeletedError):
        store.session(empty.id)
    store.set_draft(session.id, Draft(" \n"))
    assert store.sessions() == []


def test_steps_of_an_answer_are_kept_with_it(store: SessionStore) -> None:
    session = store.create()
    asked = store.add(session.id, None, "user", "?")
    answer = store.begin_answer(session.id, asked.id, "m")
    store.grow(answer.id, "One two")
    steps = AnswerSteps(0, [StepText(("One",)), StepText((" two",), 0, (" no",))], [0.25, 0.5])
    answer = store.finish(answer.id, "length", steps=steps, partial=True)
    assert store.steps(answer) == steps
    store.reopen(answer)
    answer = store.finish(answer.id, "stop")
    assert store.steps(answer) == steps
    assert store.steps(asked) is None
    store.db.run("UPDATE messages SET steps = x'00ff' WHERE id = ?", answer.id)
    assert store.steps(answer) is None
    assert not store.message(answer.id).damaged, "the text is whole"
