"""A session store, and damage to it: invalid values and changed bytes."""

import json
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from headrace.app.sessions.examine import examine
from headrace.app.sessions.export import to_document, to_markdown
from headrace.app.sessions.records import Attachment
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from headrace.app.sessions.tree import tree_lines
from headrace.runtime.errors import HeadraceError
from tests.support.summaries import make_summary

METRICS = make_summary()
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
        "summary", "draft",
    ),
    "pieces": ("message_id", "text"),
}  # fmt: skip


def write_sound(path: Path) -> Path:
    """Write two sessions of three turns each; one answer is unfinished."""
    with closing(SessionStore(path)) as store:
        for which in "ab":
            session = store.create(model="m", sampling={"temperature": 0.5, "stop": ["X"]})
            parent = None
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


def change(path: Path, statement: str, *values: object) -> None:
    """Run SQL with checks, keys and triggers off."""
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
    """Read everything readable. Raises only HeadraceError."""
    contents = {}
    for kept in examine(store).sessions:
        contents |= {message.id: message.content for message in kept.messages}
        tree_lines(kept.messages, [])
        json.dumps(to_document(kept.session, kept.messages)).encode()
        with suppress(HeadraceError):
            to_markdown(kept.session, store.branch(kept.session.id)).encode()
    for entry in or_nothing(store.sessions):
        with suppress(HeadraceError):
            store.branch(entry.session.id)
    for reading in (lambda: search(store, "answer"), lambda: search(store, "question a1"), store.recent_questions):
        json.dumps([str(item) for item in or_nothing(reading)]).encode()
    with suppress(HeadraceError):
        store.find("last")
    return contents


def or_nothing(reading: Any) -> Any:
    try:
        return reading()
    except HeadraceError:
        return []


def mutation(chance: random.Random) -> tuple[str, str, int, Any]:
    """(table, column, row number from 1, value) in `write_sound`'s store."""
    table = chance.choice(list(COLUMNS))
    most = {"messages": 12, "sessions": 2, "pieces": 2}[table]
    return table, chance.choice(COLUMNS[table]), chance.randint(1, most), chance.choice(VALUES)


def damage_row(path: Path, table: str, column: str, place: int, value: Any) -> int | None:
    """Apply it; returns the row's id, or None if SQLite refuses it (NOT NULL, UNIQUE) or there is no such row."""
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(f"SELECT rowid FROM {table} LIMIT 1 OFFSET ?", (place - 1,)).fetchone()
    try:
        change(path, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", value, found[0])
    except (sqlite3.Error, TypeError):
        return None
    return int(found[0])


def changed_pages(chance: random.Random, content: bytes) -> bytes:
    """Overwrite one to three runs of bytes in a database."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.choice((chance.randrange(100), chance.randrange(len(content))))
        length = chance.choice((1, 4, 64, 4096))
        changed[at : at + length] = chance.randbytes(len(changed[at : at + length]))
    return bytes(changed)
