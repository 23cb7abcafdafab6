"""Check of the sessions file: damage, and all readable content. Read-only.

`headrace sessions doctor` shows and exports the result. `headrace doctor` only asks SQLite whether the file is whole.

Guard: tests/app/sessions/test_damaged_store.py.
"""

from msgspec import Struct

from headrace.app.sessions.records import EVERYTHING, Message, Session
from headrace.app.sessions.rows import readable
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError

_MAX_PROBLEMS = 20  # of the file's structure; one damaged page causes many


class ReadableSession(Struct, frozen=True):
    """A session with all its readable messages; `damaged` of each names unreadable columns."""

    session: Session
    messages: list[Message]

    @property
    def is_damaged(self) -> bool:
        return bool(self.session.damaged) or any(message.damaged for message in self.messages)


class Examination(Struct, frozen=True):
    """State of the whole file.

    problems: errors of the file, in SQLite's words, and failed queries.
    sessions: those with messages or unsent text.
    """

    problems: list[str]
    sessions: list[ReadableSession]

    @property
    def is_damaged(self) -> bool:
        return bool(self.problems) or any(session.is_damaged for session in self.sessions)


def examine(store: SessionStore) -> Examination:
    """Read the whole file. Raises no error for damage."""
    problems: list[str] = []
    try:
        messages = [readable(text) for (text,) in store.db.rows(f"PRAGMA integrity_check({_MAX_PROBLEMS})")]
        problems += [line for text in messages if text != "ok" for line in text.splitlines()]
    except SessionError as error:
        problems.append(str(error))
    ids: dict[str, None] = {}
    for query in (
        "SELECT id FROM sessions",
        "SELECT DISTINCT session_id FROM messages INDEXED BY messages_by_session",  # includes lost sessions
    ):
        try:
            ids |= {id: None for (id,) in store.db.rows(query)}
        except SessionError as error:
            problems.append(str(error))
    conversations = [_read_session(store, id, problems) for id in ids]
    return Examination(
        list(dict.fromkeys(problems)),
        [conversation for conversation in conversations if conversation.messages or conversation.session.draft],
    )


def _read_session(store: SessionStore, session_id: str, problems: list[str]) -> ReadableSession:
    """Return what can be read of a session. Adds to `problems` why its messages cannot."""
    try:
        session = store.session(session_id)
    except SessionError:
        session = Session(readable(session_id), "", 0.0, 0.0, damaged=(EVERYTHING,))
    try:
        return ReadableSession(session, store.messages(session_id))
    except SessionError as error:
        problems.append(str(error))
        return ReadableSession(session, [])
