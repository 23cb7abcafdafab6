"""A damaged file of sessions: what is damaged is called so, everything else stays readable, nothing is written over.

Rows and pages are changed from a fixed seed; what comes out of a store are records or SessionErrors.
"""

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.app.chat.open_session import OpenSession
from headrace.app.cli.sessions import sessions as command
from headrace.app.sessions.examine import examine
from headrace.app.sessions.export import to_document, to_markdown
from headrace.app.sessions.records import Attachment, TurnMetrics
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from headrace.app.sessions.tree import tree_lines
from headrace.runtime.errors import HeadraceError, SessionError

METRICS = TurnMetrics(20, 12, 7, 0.05, 300.0, 150.0, 15.0, 0.3, 9000)
VALUES: list[Any] = [
    None, b"", b"\xff\xfe", "x", "", "{", "[]", "{}", "[1]", "[" * 3000, '{"temperature": "hot"}', '{"stop": 3}',
    '[{"name": 1, "text": []}]', '{"prompt_tokens": 1e999}', "\ud800", -1, 0, 3, 10**15, 2**63 - 1, 1e300, -1e300,
    float("inf"), "NaN",
]  # fmt: skip
COLUMNS = {
    "messages": (
        "id", "session_id", "parent_id", "role", "content", "created_at", "partial", "finish_reason", "model",
        "figures", "attachments", "sampling", "system",
    ),
    "sessions": (
        "id", "title", "created_at", "updated_at", "model", "system", "sampling", "active_leaf", "prompt_from",
        "summary",
    ),
    "pieces": ("message_id", "text"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions of three turns each, one answer of which was being written."""
    path = tmp_path_factory.mktemp("sound") / "sessions.db"
    with closing(SessionStore(path)) as store:
        for which in "ab":
            session, parent = store.create(model="m", sampling={"temperature": 0.5, "stop": ["X"]}), None
            for turn in range(3):
                file = Attachment("n.txt", "text")
                asked = store.add(session.id, parent, "user", f"question {which}{turn}", attachments=[file])
                said = store.begin_answer(session.id, asked.id, "m", sampling={"top_k": 3}, system="s")
                store.grow(said.id, f"answer {which}{turn} " + "word " * 300)
                if turn < 2:
                    store.finish(said.id, "stop", METRICS)
                parent = said.id
        store.db.run("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, for damage."""
    return Path(shutil.copy(sound, tmp_path / "sessions.db"))


def change(path: Path, statement: str, *values: object) -> None:
    """As no headrace would: checks, keys and triggers off."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for trigger in ("messages_added", "messages_removed", "messages_changed"):
            connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
        connection.execute(
            statement, [v if not isinstance(v, str) else v.encode("utf-8", "replace").decode() for v in values]
        )


def rows_of(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        return [connection.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall() for table in COLUMNS]


def use(store: SessionStore) -> dict[int, str]:
    """All that reads, and what can be read of each message. Raises nothing but our own errors."""
    contents = {}
    for kept in examine(store).sessions:
        contents |= {message.id: message.content for message in kept.messages}
        tree_lines(kept.messages, [])
        json.dumps(to_document(kept.session, kept.messages)).encode()
        with suppress(HeadraceError):
            to_markdown(kept.session, store.branch(kept.session.id)).encode()
    for entry in _or_nothing(store.sessions):
        with suppress(HeadraceError):
            store.branch(entry.session.id)
    for reading in (lambda: search(store, "answer"), lambda: search(store, "question a1"), store.recent_questions):
        json.dumps([str(item) for item in _or_nothing(reading)]).encode()
    with suppress(HeadraceError):
        store.find("last")
    return contents


def _or_nothing(reading: Any) -> Any:
    try:
        return reading()
    except HeadraceError:
        return []


def mutations(seed: int, count: int) -> Iterator[tuple[str, str, int, Any]]:
    chance = random.Random(seed)
    for _ in range(count):
        table = chance.choice(list(COLUMNS))
        most = {"messages": 12, "sessions": 2, "pieces": 2}[table]
        yield table, chance.choice(COLUMNS[table]), chance.randint(1, most), chance.choice(VALUES)


def try_rows(sound: Path, folder: Path, seed: int, count: int) -> int:
    """How many of `count` damaged rows SQLite took."""
    with closing(SessionStore(sound)) as store:
        before = use(store)
    tried = 0
    for table, column, place, value in mutations(seed, count):
        path = Path(shutil.copy(sound, folder / "sessions.db"))
        with closing(sqlite3.connect(path)) as connection:
            row = connection.execute(f"SELECT rowid FROM {table} LIMIT 1 OFFSET ?", (place - 1,)).fetchone()[0]
        try:
            change(path, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", value, row)
        except sqlite3.Error:
            continue  # NOT NULL, UNIQUE
        tried += 1
        stored = rows_of(path)
        with closing(SessionStore(path)) as store:
            after = use(store)
            if table != "pieces":
                changed = {key for key in before if after.get(key) != before[key]}
                assert changed <= ({row} if table == "messages" else set()), (column, value, changed)
            assert rows_of(path) == stored, (table, column, value)
            for entry in _or_nothing(store.sessions):
                with suppress(HeadraceError):
                    OpenSession(store, entry.session)
        path.unlink()
    return tried


def try_pages(sound: Path, folder: Path, seed: int, count: int) -> int:
    """How many of `count` files with changed bytes could still be opened."""
    chance, content, opened = random.Random(seed), sound.read_bytes(), 0
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            at = chance.choice((chance.randrange(100), chance.randrange(len(content))))
            length = chance.choice((1, 4, 64, 4096))
            changed[at : at + length] = chance.randbytes(len(changed[at : at + length]))
        path = folder / "sessions.db"
        path.write_bytes(changed)
        with suppress(SessionError), closing(SessionStore(path)) as store:
            opened += 1
            use(store)
        for file in folder.iterdir():
            file.unlink()
    return opened


def test_damaged_rows_damage_nothing_else(sound: Path, tmp_path: Path) -> None:
    assert try_rows(sound, tmp_path, seed=16, count=60) > 20


def test_damaged_pages_are_our_own_errors(sound: Path, tmp_path: Path) -> None:
    assert try_pages(sound, tmp_path, seed=16, count=60) > 20


def test_a_damaged_message_is_shown_and_kept_as_it_is(damaged: Path) -> None:
    change(damaged, "UPDATE messages SET content = CAST(? AS TEXT), figures = '{' WHERE id = 4", b"half \xff\xfe")
    with closing(SessionStore(damaged)) as store:
        message = store.message(4)
        assert message.content == "half \ufffd\ufffd"
        assert (message.partial, message.finish_reason) == (True, "damaged")
        assert set(message.damaged) == {"content", "figures"}
        assert len(store.branch(message.session_id)) == 6
        before = rows_of(damaged)
        for write in (lambda: store.reopen(4), lambda: store.finish(4, "stop")):
            with pytest.raises(SessionError, match="message 4 is damaged"):
                write()
        assert rows_of(damaged) == before


def test_a_damaged_setting_is_not_written_over(damaged: Path) -> None:
    change(damaged, 'UPDATE sessions SET sampling = \'{"temperature": "hot"}\'')
    with closing(SessionStore(damaged)) as store:
        session = store.find("last")
        assert (session.sampling, session.damaged) == ({}, ("sampling",))
        with pytest.raises(SessionError, match="sampling"):
            store.set_sampling(session.id, {"temperature": 0.1})
        assert store.rename(session.id, "new").title == "new"


def test_a_ring_of_messages_ends(damaged: Path) -> None:
    change(damaged, "UPDATE messages SET parent_id = 6 WHERE id = 1")
    with closing(SessionStore(damaged)) as store:
        first = store.message(1)
        assert first.damaged == ("parent_id",)
        assert [message.id for message in store.branch(first.session_id)] == [1, 2, 3, 4, 5, 6]
        assert store.below(first) == 5


def test_the_doctor_says_what_is_lost_and_saves_the_rest(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    shutil.copy(damaged, home / "data" / "sessions.db")
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    assert "12 messages" in CliRunner().invoke(command, ["doctor"], catch_exceptions=False).output
    change(home / "data" / "sessions.db", "UPDATE messages SET attachments = 'no' WHERE id = 3")
    result = CliRunner().invoke(command, ["doctor", "--export", str(tmp_path / "all.json")])
    assert isinstance(result.exception, SessionError)
    assert "message 3: attachments damaged" in result.output
    saved = json.loads((tmp_path / "all.json").read_text())
    assert sum(len(document["messages"]) for document in saved) == 12
    assert "question a1" in json.dumps(saved)


@pytest.mark.parametrize("bias", [["258=-100"], {"258": -100.0}])
def test_a_bias_is_sound_as_it_was_given_and_as_it_was_used(tmp_path: Path, bias: Any) -> None:
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        session = store.create(sampling={"logit_bias": bias})
        assert store.session(session.id).sampling == {"logit_bias": bias}
        assert not store.session(session.id).damaged
