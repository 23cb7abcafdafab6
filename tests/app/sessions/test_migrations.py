"""Files of earlier versions: migrations and old metrics."""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.app.sessions.database import _MIGRATIONS, VERSION, _statements
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore

FIGURES = {
    "prompt_tokens": 20, "reused_tokens": 12, "completion_tokens": 7, "ttft_s": 0.05,
    "prefill_tokens_per_second": 300.0, "decode_tokens_per_second": 150.0, "achieved_gb_s": 15.0, "mbu": 0.3,
    "kv_cache_bytes": 9000,
}  # fmt: skip
# Of scripts that were shipped: files that have seen them do not see a change.
_SHIPPED = ("2f520b1c7b09e34d", "89ea4d1f9b548860", "e324732359aa17e1", "f35e283f05ccc7f9", "a3991c3a9c5f476f")


def write_version_1(path: Path) -> None:
    """Write a session of version 1: a question, an answer, and an answer cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        for statement in _statements(_MIGRATIONS[0]):
            old.execute(statement)
        old.execute("PRAGMA user_version = 1")
        old.execute(
            "INSERT INTO sessions (id, title, created_at, updated_at, model) VALUES ('0a1b', 'Mills', 1, 2, 'm')"
        )
        add = (
            "INSERT INTO messages (session_id, parent_id, role, content, created_at, partial, finish_reason, model,"
            " figures) VALUES ('0a1b', ?, ?, ?, 1, ?, ?, ?, ?)"
        )
        old.execute(add, (None, "user", "What is a headrace?", 0, None, None, None))
        old.execute(add, (1, "assistant", "A channel.", 0, "stop", "m", json.dumps(FIGURES)))
        old.execute(add, (1, "assistant", "Water ", 1, None, "m", None))
        old.execute("INSERT INTO pieces (message_id, text) VALUES (3, 'turns')")
        old.execute("UPDATE sessions SET active_leaf = 3")


def test_scripts_that_were_shipped_do_not_change() -> None:
    shipped = tuple(hashlib.sha256(script.encode()).hexdigest()[:16] for script in _MIGRATIONS)
    assert shipped == _SHIPPED


def test_an_old_file_is_migrated_without_invented_values(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    write_version_1(path)
    with closing(SessionStore(path)) as store:
        store.recover("0a1b")
        asked, answer, cut_off = store.messages("0a1b")
        assert (asked.content, answer.content, cut_off.content) == ("What is a headrace?", "A channel.", "Water turns")
        assert (answer.model, cut_off.partial) == ("m", True)
        assert answer.metrics is not None
        metrics = answer.metrics.document()
        assert {name: metrics[name] for name in FIGURES} == pytest.approx(FIGURES)
        assert (metrics["prefill_tokens"], metrics["step_latency"]) == (7, None)
        assert {(message.sampling, message.system) for message in (asked, answer, cut_off)} == {(None, None)}
        assert store.session("0a1b").active_leaf == 3
        new = store.begin_answer("0a1b", asked.id, "m2", sampling={"temperature": 0.2, "stop": ["X"]}, system="Short.")
        store.finish(new.id, "stop")
        assert [hit.message_id for hit in search(store, "channel")] == [answer.id]
    with closing(SessionStore(path)) as store:
        found = store.message(new.id)
        assert (found.model, found.sampling, found.system) == ("m2", {"temperature": 0.2, "stop": ["X"]}, "Short.")
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_an_earlier_headrace_can_still_write(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    write_version_1(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as earlier, closing(SessionStore(path)) as store:
        earlier.execute(
            "INSERT INTO messages (session_id, parent_id, role, content, created_at, partial, model, attachments)"
            " VALUES ('0a1b', 3, 'user', 'Go on.', 3, 0, NULL, '[]')"
        )
        assert store.messages("0a1b")[-1].content == "Go on."


def test_an_old_file_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sessions.db"
    write_version_1(path)
    before = path.read_bytes()
    monkeypatch.setattr("headrace.app.sessions.database._is_at_rest", lambda _: True)
    with closing(SessionStore(path)) as store:
        assert [message.sampling for message in store.messages("0a1b")] == [None] * 3
    assert path.read_bytes() == before
