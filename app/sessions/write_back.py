"""Writing sessions that were kept in memory back to their file, once its disk has room again.

`record_changes` has SQLite note which sessions change in memory, by whichever method of the store; those are written.

Guard: tests/app/sessions/test_write_back.py.
"""

from headrace.app.sessions.database import SELECT_MESSAGE, Database

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


def record_changes(memory: Database) -> None:
    """Note in a table `changed` the ids of the sessions that change from now on. Raises SessionError."""
    memory.run("CREATE TABLE changed (id TEXT PRIMARY KEY)")
    for number, (change, session) in enumerate(_SESSION_BY_CHANGE.items()):
        # No INSERT OR IGNORE: SQLite raises for it within the actions of foreign keys, as where the active leaf goes.
        noted = f"INSERT INTO changed SELECT {session} WHERE {session} NOT IN (SELECT id FROM changed);"
        memory.run(f"CREATE TRIGGER changed_{number} AFTER {change} BEGIN {noted} END")


def write_back(memory: Database, file: Database, last_id: int) -> None:
    """Write the sessions that changed in `memory` since `record_changes` to `file`, in one transaction.

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
        place = {"session_id": session_id, "parent_id": ids[message["parent_id"]]}
        ids[message["id"]] = file.insert("messages", place | values)

    active = {name: ids.get(session[name]) for name in ("active_leaf", "prompt_from")}
    file.update("sessions", session_id, active)
