"""The session store: sessions and their trees of messages.

A message and its session's new active leaf are written in one transaction. An answer begins empty and partial: `grow`
appends text at a cost independent of its length, `finish` closes it. After a crash it stays partial.

`app.chat` writes through it: `SessionBranch` the settings and branches, `Turn` the answers. Queries over a damaged file
fail; `rows.py` then reads it row by row. `tests/app/sessions/test_store.py` and the kill tests guard the order of
writes.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace

from headrace.app.answer.answer_steps import AnswerSteps, unpacked
from headrace.app.sessions.database import APPENDED, SELECT_MESSAGE, Database, write_back
from headrace.app.sessions.presence import Presence
from headrace.app.sessions.records import Attachment, Draft, Message, Role, Session, SessionEntry, title_of
from headrace.app.sessions.rows import (
    marked,
    message_of,
    readable,
    readable_messages,
    readable_sessions,
    session_of,
)
from headrace.models.text.thinking import Kinds
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import DeletedError, SessionError, UnknownSessionError, UsageError
from headrace.runtime.metrics.telemetry import Summary

_RECENT_LENGTH = 4000  # characters
_RECENT = 500  # questions
_ABANDONED_S = 86400.0  # age of an empty session that is deleted
_SALVAGE = "`headrace sessions doctor --export FILE` saves what can be read"
# SQL: a message and all messages below it, on every branch.
_BELOW = (
    "WITH RECURSIVE below(id) AS (SELECT id FROM messages WHERE id = ? UNION"  # not ALL: damage may make a cycle
    " SELECT messages.id FROM messages JOIN below ON messages.parent_id = below.id)"
)


class SessionStore:
    """All sessions of one user. A store belongs to one thread. Raises SessionError.

    unsaved: why nothing is saved; None if it is.
    """

    def __init__(self, path: Path | None = None, *, to_read: bool = False) -> None:
        """path: of the file; None: the user's. to_read: see `Database`."""
        path = path or database_path()
        self.db = Database(path, to_read=to_read)
        self.unsaved: str | None = None
        self._left: int | None = None  # id of the last message, when the file was left
        self._presence = Presence(path.with_suffix(".open"))

    def close(self) -> None:
        self._presence.close()
        self.db.close()

    def go_unsaved(self) -> None:
        """Go on with a copy in memory, after the disk was full. Raises SessionError if the file cannot be read."""
        self.db.leave_file()
        (last,) = self.db.rows("SELECT coalesce(max(seq), 0) AS id FROM sqlite_sequence WHERE name = 'messages'")
        self._left = last["id"]
        self.unsaved = f"this chat is not saved: the disk of {self.db.path} is full"

    def save_again(self) -> bool:
        """Write what was kept in memory to the file, if its disk has room again; return whether it was written.

        For the end of a chat: the store goes on in memory, and writes no later change.
        """
        if self._left is None:
            return False
        try:
            with closing(Database(self.db.path)) as file:
                write_back(self.db, file, self._left)
        except SessionError:
            return False
        self.unsaved = self._left = None
        return True

    def hold(self, session_id: str) -> bool:
        """Lock this session as open, instead of the one before; return whether another process has it open, too."""
        return self._presence.open(session_id)

    # --- sessions ------------------------------------------------------------------------------------------

    def create(
        self,
        *,
        model: str | None = None,
        system: str = "",
        sampling: Mapping[str, object] | None = None,
    ) -> Session:
        """Create an empty session."""
        now = time.time()
        new = Session(secrets.token_hex(4), "", now, now, model, system, dict(sampling or {}))
        with self.db.transaction():
            # Left empty by a killed process.
            self.db.run(
                "DELETE FROM sessions WHERE active_leaf IS NULL AND draft IS NULL AND updated_at < ?",
                now - _ABANDONED_S,
            )
            self.db.insert(
                "sessions",
                {
                    "id": new.id,
                    "title": "",
                    "created_at": now,
                    "updated_at": now,
                    "model": model,
                    "system": system,
                    "sampling": json.dumps(new.sampling),
                },
            )
        return new

    def session(self, session_id: str) -> Session:
        """Return the session with this id. Raises UnknownSessionError."""
        rows = self.db.rows("SELECT * FROM sessions WHERE id = ?", session_id)
        if not rows:
            raise UnknownSessionError(
                f"there is no session {session_id}", "`headrace sessions list` lists all sessions"
            )
        return session_of(rows[0])

    def find(self, text: str, *, drafts: bool = False) -> Session:
        """Return the session with this id, this beginning of an id, or the `last` one.

        drafts: the last one may have unsent text only.
        """
        if text == "last":
            used = "active_leaf IS NOT NULL"
            if drafts:
                used += " OR draft IS NOT NULL"
            rows = self.db.rows(f"SELECT * FROM sessions WHERE {used} ORDER BY updated_at DESC LIMIT 1")
            if not rows:
                hint = "the chat keeps each one, `run --save` its own"
                raise UnknownSessionError("no conversation has been kept yet", hint)
            return session_of(rows[0])
        rows = []
        if text:  # the empty text begins every id
            rows = self.db.rows("SELECT * FROM sessions WHERE substr(id, 1, ?) = ?", len(text), text)
        if len(rows) == 1:
            return session_of(rows[0])
        problem = f"there is no session {text!r}"
        if rows:
            problem = f"{len(rows)} sessions begin with {text!r}"
        raise UnknownSessionError(problem, "`headrace sessions list` lists all sessions")

    def sessions(self, limit: int | None = None) -> list[SessionEntry]:
        """Return the sessions with messages or a draft, the last used first."""
        try:
            rows = self.db.rows(
                "SELECT sessions.*, count(messages.id) AS messages FROM sessions"
                " LEFT JOIN messages ON session_id = sessions.id GROUP BY sessions.id"
                " HAVING count(messages.id) OR draft IS NOT NULL ORDER BY updated_at DESC LIMIT ?",
                -1 if limit is None else limit,
            )
        except SessionError:
            return readable_sessions(self.db)[:limit]
        return [SessionEntry(session_of(row), row["messages"]) for row in rows]

    def rename(self, session_id: str, title: str) -> Session:
        if not title.strip():
            raise UsageError("a title must have visible characters")
        return self._change(session_id, title=title.strip())

    def set_model(self, session_id: str, model: str | None) -> Session:
        return self._change(session_id, model=model)

    def set_system(self, session_id: str, system: str) -> Session:
        return self._change(session_id, system=system)

    def set_sampling(self, session_id: str, sampling: Mapping[str, object]) -> Session:
        return self._change(session_id, sampling=json.dumps(dict(sampling)))

    def set_draft(self, session_id: str, draft: Draft) -> Session:
        """Keep unsent text with a session; a blank one removes it."""
        if not draft:
            return self._change(session_id, draft=None)
        stored = json.dumps(to_builtins(draft), ensure_ascii=False)
        return self._change(session_id, draft=stored, updated_at=time.time())

    def set_prompt_from(self, session_id: str, message_id: int | None, summary: str = "") -> Session:
        """Leave messages before `message_id` out of the prompt; `summary` replaces them."""
        return self._change(session_id, prompt_from=message_id, summary=summary)

    def delete(self, session_id: str) -> None:
        """Delete a session and all its messages."""
        with self.db.transaction(durable=True):
            self.db.run("DELETE FROM sessions WHERE id = ?", session_id)

    # --- messages ------------------------------------------------------------------------------------------

    def add(
        self,
        session_id: str,
        parent_id: int | None,
        role: Role,
        content: str,
        *,
        model: str | None = None,
        attachments: Sequence[Attachment] = (),
        partial: bool = False,
        sampling: Mapping[str, object] | None = None,
        system: str | None = None,
    ) -> Message:
        """Add a message and make it the active leaf.

        parent_id: the message before; None: it is a first message.
        role, content: of the message.
        model: that answers; None for a question.
        attachments: of a question.
        partial: an answer that `grow` continues.
        sampling, system: in effect for an answer; None for a question.

        Raises DeletedError if the session or the parent is gone.
        """
        now = time.time()
        with self.db.transaction(durable=not partial):
            self._refuse_deleted("sessions", session_id)
            self._refuse_deleted("messages", parent_id)
            new = self.db.insert(
                "messages",
                {
                    "session_id": session_id,
                    "parent_id": parent_id,
                    "role": role,
                    "content": content,
                    "created_at": now,
                    "partial": partial,
                    "model": model,
                    "attachments": json.dumps(to_builtins(attachments)),
                    "sampling": None if sampling is None else json.dumps(dict(sampling)),
                    "system": system,
                },
            )
            self.db.run(
                "UPDATE sessions SET active_leaf = ?, updated_at = ?,"
                " title = CASE WHEN title = '' THEN ? ELSE title END WHERE id = ?",
                *(new, now, title_of(content, attachments), session_id),
            )
        return self.message(new)

    def take_back(self, message: Message) -> Session:
        """Remove a message without children, and the title it gave the session."""
        with self.db.transaction(durable=True):
            self.db.run("DELETE FROM messages WHERE id = ?", message.id)
            self.db.run(
                "UPDATE sessions SET active_leaf = ?, title = CASE WHEN ? IS NULL AND title = ? THEN '' ELSE title END"
                " WHERE id = ?",
                *(
                    message.parent_id,
                    message.parent_id,
                    title_of(message.content, message.attachments),
                    message.session_id,
                ),
            )
        return self.session(message.session_id)

    def below(self, message: Message) -> int:
        """Return the number of messages below this one, on all branches."""
        rows = self.db.rows(f"{_BELOW} SELECT count(*) - 1 AS below FROM below", message.id)
        return int(rows[0]["below"])

    def remove(self, message: Message) -> Session:
        """Remove a message and all below it. The newest sibling branch becomes active, if the active one is removed."""
        with self.db.transaction(durable=True):
            shown = self.session(message.session_id).active_leaf
            below = [row["id"] for row in self.db.rows(f"{_BELOW} SELECT id FROM below", message.id)]
            self.db.run(f"{_BELOW} DELETE FROM messages WHERE id IN (SELECT id FROM below)", message.id)
            if shown in below:
                if message.parent_id is None:
                    newest = "SELECT max(id) AS leaf FROM messages WHERE session_id = ?"
                    (row,) = self.db.rows(newest, message.session_id)
                else:
                    (row,) = self.db.rows(f"{_BELOW} SELECT max(id) AS leaf FROM below", message.parent_id)
                self.db.update("sessions", message.session_id, {"active_leaf": row["leaf"]})
        return self.session(message.session_id)

    def begin_answer(
        self,
        session_id: str,
        parent_id: int,
        model: str | None,
        *,
        sampling: Mapping[str, object] | None = None,
        system: str | None = None,
    ) -> Message:
        """Add an empty, partial answer for `grow` and `finish`."""
        return self.add(
            session_id, parent_id, "assistant", "", model=model, partial=True, sampling=sampling, system=system
        )

    def reopen(self, seen: Message) -> None:
        """Make an answer partial again, without metrics, for its continuation.

        Raises SessionError if it has changed since `seen`: two processes would mix their texts.
        """
        with self.db.transaction():
            self._refuse_damaged(seen.id)
            now = self.message(seen.id)
            if (now.content, now.finish_reason) != (seen.content, seen.finish_reason):
                raise SessionError("another headrace goes on with this answer", "open the session again, or ask anew")
            unset = dict.fromkeys(("finish_reason", "figures", "kinds"))
            self.db.update("messages", seen.id, {"partial": True, **unset})

    def grow(self, message_id: int, text: str, *, durable: bool = False) -> None:
        """Append to an answer being written; `durable` makes all of its text survive a power cut.

        Raises DeletedError if the answer is gone.
        """
        with self.db.transaction(durable=durable):
            self._refuse_deleted("messages", message_id)
            self.db.insert("pieces", {"message_id": message_id, "text": text})

    def finish(
        self,
        message_id: int,
        reason: str,
        metrics: Summary | None = None,
        *,
        partial: bool = False,
        steps: AnswerSteps | None = None,
        kinds: Kinds | None = None,
    ) -> Message:
        """Close an answer.

        message_id: of the answer.
        reason: its `finish_reason`.
        metrics: None if unknown.
        partial: it was stopped, cut off or ended at a limit.
        steps: None keeps the stored ones.
        kinds: of its text; None: its tags tell.
        """
        figures = json.dumps(metrics.document()) if metrics else None
        packed_steps = None if steps is None else steps.packed()
        with self.db.transaction(durable=True):
            self._refuse_damaged(message_id)
            self._fold(message_id)
            self.db.run(
                "UPDATE messages SET partial = ?, finish_reason = ?, figures = ?, steps = coalesce(?, steps), kinds = ?"
                " WHERE id = ?",
                *(partial, reason, figures, packed_steps, json.dumps(kinds) if kinds else None, message_id),
            )
            self.db.run(
                "UPDATE sessions SET updated_at = ? WHERE id = (SELECT session_id FROM messages WHERE id = ?)",
                *(time.time(), message_id),
            )
        return self.message(message_id)

    def steps(self, message: Message) -> AnswerSteps | None:
        """Return the steps of an answer; None if there are none, or they are damaged."""
        rows = self.db.rows("SELECT * FROM messages WHERE id = ?", message.id)
        stored = rows[0]["steps"] if rows else None
        return unpacked(stored, message.content)

    def message(self, message_id: int) -> Message:
        rows = self.db.rows(f"{SELECT_MESSAGE} WHERE id = ?", message_id)
        if not rows:
            raise DeletedError(f"there is no message {message_id}")
        return message_of(rows[0])

    def messages(self, session_id: str) -> list[Message]:
        """Return the messages of all branches, parents before children."""
        try:
            messages = [
                message_of(row)
                for row in self.db.rows(f"{SELECT_MESSAGE} WHERE session_id = ? ORDER BY id", session_id)
            ]
        except SessionError:
            messages = readable_messages(self.db, session_id)
        ids = {message.id for message in messages}
        for index, message in enumerate(messages):
            if message.parent_id is not None and message.parent_id not in ids:  # else it would be invisible
                messages[index] = replace(marked(message, ["parent_id"]), parent_id=None)
        return messages

    def recent_questions(self) -> list[str]:
        """Return the latest user messages of all sessions, oldest first, without long ones."""
        rows = self.db.rows(
            "SELECT content FROM messages WHERE role = 'user' AND length(content) <= ? ORDER BY id DESC LIMIT ?",
            *(_RECENT_LENGTH, _RECENT),
        )
        return [readable(row["content"]) for row in reversed(rows)]

    def branch(self, session_id: str, leaf: int | None = None) -> list[Message]:
        """Return the messages from the first one to `leaf` (None: the active leaf)."""
        if leaf is None:
            leaf = self.session(session_id).active_leaf
        by_id = {message.id: message for message in self.messages(session_id)}
        path: list[Message] = []
        while leaf in by_id:  # another process may have removed the branch
            path.append(by_id[leaf])
            leaf = by_id[leaf].parent_id
        return path[::-1]

    def alternatives(self, message: Message) -> list[int]:
        """Return the ids of a message and its siblings, oldest first."""
        rows = self.db.rows(
            "SELECT id FROM messages WHERE session_id = ? AND parent_id IS ? ORDER BY id",
            *(message.session_id, message.parent_id),
        )
        return [row["id"] for row in rows]

    def activate(self, message: Message) -> Session:
        """Activate the branch through `message` to the newest message below it."""
        rows = self.db.rows(f"{_BELOW} SELECT max(id) AS leaf FROM below", message.id)
        return self._change(message.session_id, active_leaf=rows[0]["leaf"])

    def reveal(self, message: Message) -> Session:
        """Activate a branch through `message`, unless the active one has it."""
        if any(shown.id == message.id for shown in self.branch(message.session_id)):
            return self.session(message.session_id)
        return self.activate(message)

    def recover(self, session_id: str) -> None:
        """Fold text appended by a killed process into its message, where search finds it."""
        unfinished = "SELECT DISTINCT message_id FROM pieces JOIN messages ON messages.id = message_id"
        rows = self.db.rows(f"{unfinished} WHERE session_id = ?", session_id)
        if rows:
            with self.db.transaction(durable=True):
                for row in rows:
                    if not self.message(row["message_id"]).damaged:
                        self._fold(row["message_id"])

    def _fold(self, message_id: int) -> None:
        self.db.run(f"UPDATE messages SET content = content || {APPENDED} WHERE id = ?", message_id)
        self.db.run("DELETE FROM pieces WHERE message_id = ?", message_id)

    def _refuse_deleted(self, table: str, row: int | str | None) -> None:
        """Raise DeletedError if another process deleted the row."""
        if row is not None and not self.db.rows(f"SELECT 1 FROM {table} WHERE id = ?", row):
            what = table.removesuffix("s")  # a session, or a message
            raise DeletedError(f"this {what} was deleted elsewhere", "open the session again, or begin another")

    def _refuse_damaged(self, message_id: int) -> None:
        """Raise SessionError for a damaged message: the file may still be repaired."""
        if damaged := self.message(message_id).damaged:
            raise SessionError(f"message {message_id} is damaged ({', '.join(damaged)}) and stays as it is", _SALVAGE)

    def _change(self, session_id: str, **columns: object) -> Session:
        with self.db.transaction():
            if damaged := set(self.session(session_id).damaged) & {*columns}:
                what = ", ".join(sorted(damaged))
                raise SessionError(f"session {session_id} is damaged ({what}) and stays as it is", _SALVAGE)
            self.db.update("sessions", session_id, columns)
        return self.session(session_id)


def database_path() -> Path:
    """Return the path of the sessions file."""
    return data_dir() / "sessions.db"
