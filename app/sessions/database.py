"""The sessions' SQLite file: schema, connection, transactions.

WAL mode: readers and the writer do not wait for each other. Every transaction is short and takes the write lock at its
start. A killed process loses nothing committed; `durable` transactions also survive a power cut. A file in a read-only
folder can be read.

After a full disk the connection goes on in memory (`Database.leave_file`). Once there is room again, `write_back`
writes the sessions that changed meanwhile, by whichever method of the store.

The queries are in `store.py`. A change of _SCHEMA is another VERSION: files of others are refused.

Guards: tests/app/sessions/test_store.py and test_write_back.py, tests/faults/test_kills.py.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.runtime.errors import FullDiskError, SessionError

_BUSY_MS = 5000  # wait for another process's transaction, which takes milliseconds
_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_WRITABLE = "the file and its folder must be writable; HEADRACE_HOME=DIR keeps everything in another folder"
# Hints by a part of SQLite's message.
_HINTS = {
    "locked": "another headrace holds it; try again",
    "full": "make room on the disk",
    "disk I/O": "make room on the disk if it is full; if it is not, it may be failing",
    "readonly": _WRITABLE,
    "unable to open": _WRITABLE,
    "fts5": "this Python's SQLite was built without FTS5; another Python has it",
    "not a database": "move the file away to begin anew",
    "malformed": "`headrace sessions doctor --export FILE` saves what can be read; then move the file away",
}

_SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    model TEXT,
    system TEXT NOT NULL DEFAULT '',
    sampling TEXT NOT NULL DEFAULT '{}',     -- JSON object
    active_leaf INTEGER REFERENCES messages(id) ON DELETE SET NULL,
    prompt_from INTEGER REFERENCES messages(id) ON DELETE SET NULL,
    summary TEXT NOT NULL DEFAULT '',
    draft TEXT                               -- what was typed and not sent, a JSON object
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    parent_id INTEGER REFERENCES messages(id),  -- no cascade: a long chat would exceed its depth limit
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content TEXT NOT NULL,
    created_at REAL NOT NULL,
    partial INTEGER NOT NULL DEFAULT 0,
    finish_reason TEXT,
    model TEXT,
    figures TEXT,                            -- the metrics of an answer, a JSON object
    attachments TEXT NOT NULL DEFAULT '[]',  -- JSON list of {name, text}
    sampling TEXT,                           -- what was in effect for an answer, a JSON object
    system TEXT,                             -- the system prompt of an answer
    steps BLOB,                              -- token boundaries and step latencies of an answer, compressed
    kinds TEXT                               -- lengths of an answer's parts, see `Kinds`; NULL: its tags tell
);
CREATE INDEX messages_by_session ON messages(session_id);
CREATE INDEX messages_by_parent ON messages(parent_id);
-- What an answer that is being written has grown by: appended in small rows, folded into its message at the end.
CREATE TABLE pieces (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id INTEGER NOT NULL REFERENCES messages(id) ON DELETE CASCADE,
    text TEXT NOT NULL
);
CREATE INDEX pieces_by_message ON pieces(message_id);
CREATE VIRTUAL TABLE message_index USING fts5(
    content, content='messages', content_rowid='id', tokenize="unicode61 remove_diacritics 2"
);
CREATE TRIGGER messages_added AFTER INSERT ON messages BEGIN
    INSERT INTO message_index(rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER messages_removed AFTER DELETE ON messages BEGIN
    INSERT INTO message_index(message_index, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER messages_changed AFTER UPDATE OF content ON messages BEGIN
    INSERT INTO message_index(message_index, rowid, content) VALUES ('delete', old.id, old.content);
    INSERT INTO message_index(rowid, content) VALUES (new.id, new.content);
END;
"""
VERSION = 5
"""The version of _SCHEMA, in the file's `user_version`."""

# SQL: text appended to a message that is not folded into it yet.
APPENDED = """
    coalesce((SELECT group_concat(text, '') FROM
        (SELECT text FROM pieces WHERE message_id = messages.id ORDER BY id)), '')
"""
# SQL: messages with their full text as `whole`.
SELECT_MESSAGE = f"SELECT *, content || {APPENDED} AS whole FROM messages"

# Columns that `write_back` copies: all but ids and references.
_SESSION = ("title", "created_at", "updated_at", "model", "system", "sampling", "summary", "draft")
_MESSAGE = (
    *("role", "content", "created_at", "partial", "finish_reason", "model", "figures", "attachments", "sampling"),
    *("system", "steps", "kinds"),
)

# Changes of rows, with the id of the session each belongs to. Deleting an empty session is none: a
# `SessionStore.create` in the file deletes it a day later, if it is still empty.
_SESSION_BY_CHANGE = {
    "INSERT ON sessions": "new.id",
    "UPDATE ON sessions": "new.id",
    "DELETE ON sessions WHEN old.active_leaf IS NOT NULL OR old.draft IS NOT NULL": "old.id",
    "INSERT ON messages": "new.session_id",
    "UPDATE ON messages": "new.session_id",
    "DELETE ON messages": "old.session_id",
    "INSERT ON pieces": "(SELECT session_id FROM messages WHERE id = new.message_id)",
}


class Database:
    """One connection, for one thread. SQLite's errors become SessionError.

    full: the last write met a full disk, so `store.py` may go on in memory (`leave_file`).
    """

    def __init__(self, path: Path, *, to_read: bool = False) -> None:
        """to_read: a missing file is not made, and counts as an empty one."""
        self.path = path
        self.full = False
        self._durable: bool | None = None  # mode of transactions; None: SQLite's default
        with self._explained():
            if to_read and not path.exists():
                uri = "file::memory:"
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                _make_private(path)
                uri = path.absolute().as_uri()
                if _is_at_rest(path):
                    uri += "?immutable=1"
            # Statements outside of `transaction` commit by themselves.
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_MS / 1000)
            self._connection.row_factory = sqlite3.Row
            self._connection.text_factory = text_of
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        with self._explained():
            return self._connection.execute(sql, _storable(values)).fetchall()

    def run(self, sql: str, *values: object) -> int:
        """Execute one statement and return the row id it inserted, or 0."""
        with self._explained():
            return self._connection.execute(sql, _storable(values)).lastrowid or 0

    def insert(self, table: str, values: Mapping[str, object]) -> int:
        """Insert a row with these values by column, and return its row id."""
        columns = ", ".join(values)
        marks = ", ".join("?" * len(values))
        return self.run(f"INSERT INTO {table} ({columns}) VALUES ({marks})", *values.values())

    def update(self, table: str, row: object, values: Mapping[str, object]) -> None:
        """Change these columns of the row with the id `row`."""
        assignments = ", ".join(f"{name} = ?" for name in values)
        self.run(f"UPDATE {table} SET {assignments} WHERE id = ?", *values.values(), row)

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Run a block as one transaction; durable: wait until it is on the disk."""
        with self._explained():
            # FULL waits for the disk at every commit, NORMAL only at checkpoints. Set outside of transactions alone.
            if durable is not self._durable:
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._explained():
                self._connection.execute("COMMIT")
            self.full = False
        except BaseException:
            if self._connection.in_transaction:  # a full disk ends it
                self._connection.execute("ROLLBACK")
            raise

    def leave_file(self) -> None:
        """Go on in memory, with a copy of everything, and note which sessions change: `write_back` writes those."""
        with self._explained():
            memory = sqlite3.connect(":memory:", isolation_level=None)
            self._connection.backup(memory)
        memory.execute("PRAGMA foreign_keys = ON")
        memory.row_factory = sqlite3.Row
        memory.text_factory = text_of
        self._connection.close()
        self._connection = memory
        self._durable = None
        self.full = False
        _record_changes(self)

    def close(self) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA fullfsync = ON")  # macOS: a durable commit is on the medium, not in its cache
        self._connection.execute("PRAGMA secure_delete = ON")  # a deleted conversation is gone from the file
        if self._version() == 0:
            self._use_wal()
            self._create()
        version = self._version()
        if version < VERSION:
            raise SessionError(
                f"{self.path} was written by an older version of headrace, whose sessions cannot be read",
                "move the file away to begin anew, or set HEADRACE_HOME to another folder",
            )
        if version > VERSION:
            raise SessionError(
                f"{self.path} was written by a newer version of headrace",
                "update headrace, or set HEADRACE_HOME to another folder",
            )

    def _create(self) -> None:
        """Create the tables of a new file."""
        with self.transaction(durable=True):
            if self._version() != 0:  # read again: another process may have created them
                return
            for statement in _statements(_SCHEMA):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def _use_wal(self) -> None:
        """Switch the file to WAL mode; SQLite's busy timeout does not apply to this statement."""
        deadline = time.monotonic() + _BUSY_MS / 1000
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # names in a damaged schema
            hint = next((hint for part, hint in _HINTS.items() if part in str(error)), None)
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK  # the low byte is the code without its details
            self.full = self.full or full
            kind = FullDiskError if full else SessionError
            raise kind(f"the sessions in {self.path} cannot be used: {error}", hint) from error
        except OSError as error:
            hint = _WRITABLE if isinstance(error, PermissionError) or error.errno == errno.EROFS else None
            raise SessionError(f"{self.path} cannot be opened: {error.strerror}", hint) from error


def _make_private(path: Path) -> None:
    """Create a missing file with mode 600, which SQLite's other files take over."""
    with suppress(OSError):  # SQLite reports it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _is_at_rest(path: Path) -> bool:
    """True if the file is read-only and not open: WAL mode would create files even for reading."""
    return path.is_file() and not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()


def _storable(values: Sequence[object]) -> list[object]:
    return [storable(value) if isinstance(value, str) else value for value in values]


def text_of(data: bytes) -> str:
    """Decode text of the file; invalid UTF-8, left by damage, becomes lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def storable(text: str) -> str:
    """Replace NUL, which ends text in SQLite's functions, and lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements; `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# -- after a full disk: sessions that were kept in memory, back to their file ----------------------------------------


def _record_changes(memory: Database) -> None:
    """Note in a table `changed` the ids of the sessions that change from now on. Raises SessionError."""
    memory.run("CREATE TABLE changed (id TEXT PRIMARY KEY)")
    for number, (change, session) in enumerate(_SESSION_BY_CHANGE.items()):
        # No INSERT OR IGNORE: SQLite raises for it within the actions of foreign keys, as where the active leaf goes.
        noted = f"INSERT INTO changed SELECT {session} WHERE {session} NOT IN (SELECT id FROM changed);"
        memory.run(f"CREATE TRIGGER changed_{number} AFTER {change} BEGIN {noted} END")


def write_back(memory: Database, file: Database, last_id: int) -> None:
    """Write the sessions that changed in `memory` since it left the file to `file`, in one transaction.

    Sessions and messages that were deleted in memory are deleted, unless other processes added messages below them.
    last_id: of the messages that both have. Later ones get new ids in the file, where other processes may have added
    some. Raises SessionError, and changes nothing, if the file cannot be written.
    """
    existing = {row["id"] for row in memory.rows("SELECT id FROM sessions")}
    with file.transaction(durable=True):
        for row in memory.rows("SELECT id FROM changed"):
            if row["id"] in existing:
                _write_session(memory, file, row["id"], last_id)
            else:
                # Messages after `last_id` are another process's.
                added = "SELECT 1 FROM messages WHERE session_id = sessions.id AND id > ?"
                file.run(f"DELETE FROM sessions WHERE id = ? AND NOT EXISTS ({added})", row["id"], last_id)


def _write_session(memory: Database, file: Database, session_id: str, last_id: int) -> None:
    """Write one session. Messages up to `last_id` keep their ids, later ones get new ones, and `ids` maps them."""
    # The session, without references to messages, which may not be there yet.
    (session,) = memory.rows("SELECT * FROM sessions WHERE id = ?", session_id)
    file.run("INSERT OR IGNORE INTO sessions (id, title, created_at, updated_at) VALUES (?, '', 0, 0)", session_id)
    file.update("sessions", session_id, {name: session[name] for name in _SESSION})

    # Messages that were deleted in memory. Those that another process answered meanwhile stay, with their parents.
    messages = memory.rows(f"{SELECT_MESSAGE} WHERE session_id = ? ORDER BY id", session_id)
    there = {row["id"] for row in file.rows("SELECT id FROM messages WHERE session_id = ?", session_id)}
    ids_in_memory = {row["id"] for row in messages}
    deleted = [id for id in there - ids_in_memory if id <= last_id]
    child = "SELECT 1 FROM messages AS child WHERE child.parent_id = messages.id"
    for gone in sorted(deleted, reverse=True):  # children before their parents
        file.run(f"DELETE FROM messages WHERE id = ? AND NOT EXISTS ({child})", gone)

    # Changed and new messages, parents first.
    ids: dict[int | None, int | None] = {None: None}
    for message in messages:
        values = {**{name: message[name] for name in _MESSAGE}, "content": message["whole"]}
        if message["id"] <= last_id and message["id"] in there:
            ids[message["id"]] = message["id"]
            file.run("DELETE FROM pieces WHERE message_id = ?", message["id"])
            file.update("messages", message["id"], values)
            continue
        links = {"session_id": session_id, "parent_id": ids[message["parent_id"]]}
        ids[message["id"]] = file.insert("messages", links | values)

    active = {name: ids.get(session[name]) for name in ("active_leaf", "prompt_from")}
    file.update("sessions", session_id, active)
