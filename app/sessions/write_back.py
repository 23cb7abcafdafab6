"""Writing sessions that were kept in memory back to their file, once its disk has room again."""

from collections.abc import Mapping

from headrace.app.sessions.database import SELECT_MESSAGE, Database

_SESSION = ("title", "created_at", "updated_at", "model", "system", "sampling", "summary", "draft")
_MESSAGE = (
    *("role", "content", "created_at", "partial", "finish_reason", "model", "figures", "attachments", "sampling"),
    *("system", "steps", "kinds"),
)


def write_back(memory: Database, file: Database, since: float, last_id: int) -> None:
    """Write the sessions of `memory` that changed after `since` to `file`, in one transaction.

    last_id: of the messages that both have. Later ones get new ids in the file, where other processes may have added
    some. Raises SessionError, and changes nothing, if the file cannot be written.
    """
    with file.transaction(durable=True):
        for session in memory.rows("SELECT * FROM sessions WHERE updated_at >= ?", since):
            _write_session(memory, file, session["id"], last_id)


def _write_session(memory: Database, file: Database, session_id: str, last_id: int) -> None:
    """Write one session. Messages up to `last_id` keep their ids, later ones get new ones, and `ids` maps them."""
    # The session, without references to messages, which may not be there yet.
    (session,) = memory.rows("SELECT * FROM sessions WHERE id = ?", session_id)
    file.run("INSERT OR IGNORE INTO sessions (id, title, created_at, updated_at) VALUES (?, '', 0, 0)", session_id)
    _update(file, "sessions", session_id, {name: session[name] for name in _SESSION})

    # Messages that were deleted in memory.
    messages = memory.rows(f"{SELECT_MESSAGE} WHERE session_id = ? ORDER BY id", session_id)
    there = {row["id"] for row in file.rows("SELECT id FROM messages WHERE session_id = ?", session_id)}
    ids_in_memory = {row["id"] for row in messages}
    deleted = [id for id in there - ids_in_memory if id <= last_id]
    for gone in sorted(deleted, reverse=True):  # children before their parents
        file.run("DELETE FROM messages WHERE id = ?", gone)

    # Changed and new messages, parents first.
    ids: dict[int | None, int | None] = {None: None}
    for message in messages:
        values = {**{name: message[name] for name in _MESSAGE}, "content": message["whole"]}
        if message["id"] <= last_id and message["id"] in there:
            ids[message["id"]] = message["id"]
            file.run("DELETE FROM pieces WHERE message_id = ?", message["id"])
            _update(file, "messages", message["id"], values)
            continue
        columns = {"session_id": session_id, "parent_id": ids[message["parent_id"]], **values}
        marks = ", ".join("?" * len(columns))
        ids[message["id"]] = file.run(
            f"INSERT INTO messages ({', '.join(columns)}) VALUES ({marks})", *columns.values()
        )

    active = {name: ids.get(session[name]) for name in ("active_leaf", "prompt_from")}
    _update(file, "sessions", session_id, active)


def _update(file: Database, table: str, row: object, values: Mapping[str, object]) -> None:
    assignments = ", ".join(f"{name} = ?" for name in values)
    file.run(f"UPDATE {table} SET {assignments} WHERE id = ?", *values.values(), row)
