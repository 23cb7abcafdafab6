"""Reading of a damaged sessions file row by row, where a query over all rows fails.

`SessionStore` falls back to it. INDEXED BY has SQLite read an index in place of the table: damage mostly is in one of
them.

Guards: tests/app/sessions/test_damaged_store.py.
"""

from contextlib import suppress

from headrace.app.sessions.database import SELECT_MESSAGE, Database
from headrace.app.sessions.records import Message, SessionEntry
from headrace.app.sessions.rows import lost_message, message_of, session_of
from headrace.runtime.errors import SessionError


def readable_sessions(db: Database) -> list[SessionEntry]:
    """Return the sessions with messages, the last used first, without unreadable rows."""
    counts = db.rows(
        "SELECT session_id, count(*) AS messages FROM messages INDEXED BY messages_by_session GROUP BY session_id"
    )
    entries: list[SessionEntry] = []
    for row in counts:
        with suppress(SessionError):
            for session in db.rows("SELECT * FROM sessions WHERE id = ?", row["session_id"]):
                entries.append(SessionEntry(session_of(session), row["messages"]))
    return sorted(entries, key=lambda entry: -entry.session.updated_at)


def readable_messages(db: Database, session_id: str) -> list[Message]:
    """Return all messages of a session, with a placeholder for each unreadable row; the index gives its parent."""
    ids = db.rows("SELECT id FROM messages INDEXED BY messages_by_session WHERE session_id = ?", session_id)
    parents = {
        row["id"]: row["parent_id"]
        for row in db.rows("SELECT id, parent_id FROM messages INDEXED BY messages_by_parent")
    }
    messages: list[Message] = []
    for number in sorted(row["id"] for row in ids):
        try:
            messages += map(message_of, db.rows(f"{SELECT_MESSAGE} WHERE id = ?", number))
        except SessionError:
            parent = parents.get(number)
            if parent is not None and parent >= number:  # damage: a parent is older than its answers
                parent = None
            messages.append(lost_message(number, session_id, parent))
    return messages
