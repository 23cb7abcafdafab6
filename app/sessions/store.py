"""Sessions on disk: create, list, resume, change, delete, and the tree of messages each one is.

A message is written in one transaction, together with its session's new active leaf. An answer begins empty and
partial; `grow` appends what came, which costs the same however long it is, and `finish` closes it. What a crash
leaves unfinished is partial.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.app.sessions.database import APPENDED, Database
from headrace.app.sessions.presence import Presence
from headrace.app.sessions.records import Attachment, Message, Role, Session, SessionEntry
from headrace.app.sessions.rows import lost_message, marked, message_of, readable, session_of
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import DeletedError, SessionError, UsageError
from headrace.runtime.metrics.telemetry import Summary

_TITLE_LENGTH = 60  # characters
_REMEMBERED_LENGTH = 4000  # characters
_ABANDONED_S = 86400.0  # an empty session that old has nobody sitting before it
_SALVAGE = "`headrace sessions doctor --export FILE` saves what can be read"
# SQL: a message and all that follow it, on every branch.
_BELOW = (
    "WITH RECURSIVE below(id) AS (SELECT id FROM messages WHERE id = ? UNION"  # not ALL: damage may have made a ring
    " SELECT messages.id FROM messages JOIN below ON messages.parent_id = below.id)"
)
_MESSAGE = f"SELECT *, content || {APPENDED} AS whole FROM messages"


class SessionStore:
    """All sessions of one user. Used from one thread; a second thread opens its own. Raises SessionError."""

    def __init__(self, path: Path | None = None) -> None:
        path = path or database_path()
        self.db = Database(path)
        self._presence = Presence(path.with_suffix(".open"))

    def close(self) -> None:
        self._presence.close()
        self.db.close()

    def hold(self, session_id: str) -> bool:
        """This session is on the screen from now on, and no other; whether it is on that of another process, too."""
        return self._presence.open(session_id)

    # --- sessions ------------------------------------------------------------------------------------------

    def create(
        self, *, model: str | None = None, system: str = "", sampling: Mapping[str, Any] | None = None, title: str = ""
    ) -> Session:
        """A new, empty session."""
        now = time.time()
        new = Session(secrets.token_hex(4), title, now, now, model, system, dict(sampling or {}))
        with self.db.transaction():
            # What a killed process left without ever saying anything in it.
            self.db.run("DELETE FROM sessions WHERE active_leaf IS NULL AND updated_at < ?", now - _ABANDONED_S)
            self.db.run(
                "INSERT INTO sessions (id, title, created_at, updated_at, model, system, sampling)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                *(new.id, title, now, now, model, system, json.dumps(new.sampling)),
            )
        return new

    def session(self, session_id: str) -> Session:
        """The session with this id."""
        rows = self.db.rows("SELECT * FROM sessions WHERE id = ?", session_id)
        if not rows:
            raise DeletedError(f"there is no session {session_id}", "`headrace sessions list` shows what is there")
        return session_of(rows[0])

    def find(self, text: str) -> Session:
        """The session that a person means by `text`: its id, the beginning of it, or `last`."""
        if text == "last":
            rows = self.db.rows("SELECT * FROM sessions WHERE active_leaf IS NOT NULL ORDER BY updated_at DESC LIMIT 1")
            if not rows:
                raise SessionError("no conversation has been kept yet", "the chat keeps each one, `run --save` its own")
        else:
            rows = self.db.rows("SELECT * FROM sessions WHERE substr(id, 1, ?) = ?", len(text), text) if text else []
        if len(rows) != 1:
            problem = f"{len(rows)} sessions begin with {text!r}" if rows else f"there is no session {text!r}"
            raise SessionError(problem, "`headrace sessions list` shows what is there")
        return session_of(rows[0])

    def sessions(self, limit: int | None = None) -> list[SessionEntry]:
        """Sessions that have messages, the one used last first."""
        try:
            rows = self.db.rows(
                "SELECT sessions.*, count(messages.id) AS messages FROM sessions"
                " JOIN messages ON session_id = sessions.id GROUP BY sessions.id ORDER BY updated_at DESC LIMIT ?",
                -1 if limit is None else limit,
            )
        except SessionError:
            return self._sessions_one_by_one()[:limit]
        return [SessionEntry(session_of(row), row["messages"]) for row in rows]

    def _sessions_one_by_one(self) -> list[SessionEntry]:
        """Of a damaged file: without the rows that cannot be read."""
        counts = self.db.rows(
            "SELECT session_id, count(*) AS messages FROM messages INDEXED BY messages_by_session GROUP BY session_id"
        )
        entries: list[SessionEntry] = []
        for row in counts:
            with suppress(SessionError):
                entries.append(SessionEntry(self.session(row["session_id"]), row["messages"]))
        return sorted(entries, key=lambda entry: -entry.session.updated_at)

    def rename(self, session_id: str, title: str) -> Session:
        if not title.strip():
            raise UsageError("a title has to show something")
        return self._change(session_id, title=title.strip())

    def set_model(self, session_id: str, model: str | None) -> Session:
        return self._change(session_id, model=model)

    def set_system(self, session_id: str, system: str) -> Session:
        return self._change(session_id, system=system)

    def set_sampling(self, session_id: str, sampling: Mapping[str, Any]) -> Session:
        return self._change(session_id, sampling=json.dumps(dict(sampling)))

    def set_prompt_from(self, session_id: str, message_id: int | None, summary: str = "") -> Session:
        """Messages before `message_id` are no longer sent to the model; `summary` stands in for them."""
        return self._change(session_id, prompt_from=message_id, summary=summary)

    def delete(self, session_id: str) -> None:
        """Remove a session and all its messages."""
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
        sampling: Mapping[str, Any] | None = None,
        system: str | None = None,
    ) -> Message:
        """A new message below `parent_id` (None: a first message); it becomes the active leaf.

        Raises DeletedError where the session or that message is gone.
        """
        now = time.time()
        with self.db.transaction(durable=not partial):
            self._refuse_deleted("sessions", session_id)
            self._refuse_deleted("messages", parent_id)
            new = self.db.run(
                "INSERT INTO messages"
                " (session_id, parent_id, role, content, created_at, partial, model, attachments, sampling, system)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(session_id, parent_id, role, content, now, partial, model),
                json.dumps([asdict(attachment) for attachment in attachments]),
                *(None if sampling is None else json.dumps(dict(sampling)), system),
            )
            self.db.run(
                "UPDATE sessions SET active_leaf = ?, updated_at = ?,"
                " title = CASE WHEN title = '' THEN ? ELSE title END WHERE id = ?",
                *(new, now, _title(content, attachments), session_id),
            )
        return Message(
            new,
            session_id,
            parent_id,
            role,
            content,
            now,
            partial,
            model=model,
            attachments=tuple(attachments),
            sampling=sampling,
            system=system,
        )

    def take_back(self, message: Message) -> Session:
        """Remove a message that nothing follows, as if it had not been said."""
        with self.db.transaction(durable=True):
            self.db.run("DELETE FROM messages WHERE id = ?", message.id)
            self.db.run(
                "UPDATE sessions SET active_leaf = ?, title = CASE WHEN ? IS NULL AND title = ? THEN '' ELSE title END"
                " WHERE id = ?",
                *(
                    message.parent_id,
                    message.parent_id,
                    _title(message.content, message.attachments),
                    message.session_id,
                ),
            )
        return self.session(message.session_id)

    def below(self, message: Message) -> int:
        """How many messages follow this one, on all branches."""
        rows = self.db.rows(f"{_BELOW} SELECT count(*) - 1 AS below FROM below", message.id)
        return int(rows[0]["below"])

    def remove(self, message: Message) -> Session:
        """Remove a message and all that follow it. If that was the active branch, the newest beside it becomes it."""
        with self.db.transaction(durable=True):
            shown = self.session(message.session_id).active_leaf
            below = [row["id"] for row in self.db.rows(f"{_BELOW} SELECT id FROM below", message.id)]
            self.db.run(f"{_BELOW} DELETE FROM messages WHERE id IN (SELECT id FROM below)", message.id)
            if shown in below:
                beside = f"{_BELOW} SELECT max(id) AS leaf FROM below"
                of_all = "SELECT max(id) AS leaf FROM messages WHERE session_id = ?"
                parent = message.parent_id
                (row,) = self.db.rows(*((of_all, message.session_id) if parent is None else (beside, parent)))
                self.db.run("UPDATE sessions SET active_leaf = ? WHERE id = ?", row["leaf"], message.session_id)
        return self.session(message.session_id)

    def begin_answer(
        self,
        session_id: str,
        parent_id: int,
        model: str | None,
        *,
        sampling: Mapping[str, Any] | None = None,
        system: str | None = None,
    ) -> Message:
        """An empty answer that `grow` and `finish` complete."""
        return self.add(
            session_id, parent_id, "assistant", "", model=model, partial=True, sampling=sampling, system=system
        )

    def reopen(self, seen: Message) -> None:
        """An answer is continued: it is partial again, and nothing is known of how it went, until `finish`.

        Raises SessionError where it is not as it was seen: what two processes add would be mixed.
        """
        with self.db.transaction():
            self._refuse_damaged(seen.id)
            now = self.message(seen.id)
            if (now.content, now.finish_reason) != (seen.content, seen.finish_reason):
                raise SessionError("another headrace goes on with this answer", "open the session again, or ask anew")
            self.db.run("UPDATE messages SET partial = 1, finish_reason = NULL, figures = NULL WHERE id = ?", seen.id)

    def grow(self, message_id: int, text: str, *, durable: bool = False) -> None:
        """Append to an answer that is being written. `durable` keeps all that came before through a power cut, too.

        Raises DeletedError where the answer is gone.
        """
        with self.db.transaction(durable=durable):
            self._refuse_deleted("messages", message_id)
            self.db.run("INSERT INTO pieces (message_id, text) VALUES (?, ?)", message_id, text)

    def finish(self, message_id: int, reason: str, metrics: Summary | None = None, *, partial: bool = False) -> Message:
        """Close an answer; `partial` where it was stopped, cut off or ran into a limit."""
        with self.db.transaction(durable=True):
            self._refuse_damaged(message_id)
            self._fold(message_id)
            self.db.run(
                "UPDATE messages SET partial = ?, finish_reason = ?, figures = ? WHERE id = ?",
                *(partial, reason, json.dumps(metrics.document()) if metrics else None, message_id),
            )
            self.db.run(
                "UPDATE sessions SET updated_at = ? WHERE id = (SELECT session_id FROM messages WHERE id = ?)",
                *(time.time(), message_id),
            )
        return self.message(message_id)

    def message(self, message_id: int) -> Message:
        rows = self.db.rows(f"{_MESSAGE} WHERE id = ?", message_id)
        if not rows:
            raise DeletedError(f"there is no message {message_id}")
        return message_of(rows[0])

    def messages(self, session_id: str) -> list[Message]:
        """Every message on every branch, parents before children."""
        try:
            found = [
                message_of(row) for row in self.db.rows(f"{_MESSAGE} WHERE session_id = ? ORDER BY id", session_id)
            ]
        except SessionError:
            found = self._messages_one_by_one(session_id)
        ids = {message.id for message in found}
        return [
            # What hangs on nothing that is there hangs on the beginning, or nobody would see it.
            message
            if message.parent_id is None or message.parent_id in ids
            else replace(marked(message, ["parent_id"]), parent_id=None)
            for message in found
        ]

    def _messages_one_by_one(self, session_id: str) -> list[Message]:
        """Of a damaged file: with a placeholder for each row that cannot be read, hung where the index has it."""
        ids = self.db.rows("SELECT id FROM messages INDEXED BY messages_by_session WHERE session_id = ?", session_id)
        parents = {
            row["id"]: row["parent_id"]
            for row in self.db.rows("SELECT id, parent_id FROM messages INDEXED BY messages_by_parent")
        }
        found: list[Message] = []
        for number in sorted(row["id"] for row in ids):
            try:
                found.append(self.message(number))
            except SessionError:
                parent = parents.get(number)
                found.append(
                    lost_message(number, session_id, parent if parent is not None and parent < number else None)
                )
        return found

    def recent_questions(self, limit: int = 500) -> list[str]:
        """What was asked last, in all sessions, oldest first; long texts, which nobody means to send again, are not."""
        rows = self.db.rows(
            "SELECT content FROM messages WHERE role = 'user' AND length(content) <= ? ORDER BY id DESC LIMIT ?",
            *(_REMEMBERED_LENGTH, limit),
        )
        return [readable(row["content"]) for row in reversed(rows)]

    def branch(self, session_id: str, leaf: int | None = None) -> list[Message]:
        """The messages from the first one to `leaf` (None: the active leaf)."""
        at = leaf if leaf is not None else self.session(session_id).active_leaf
        every = {message.id: message for message in self.messages(session_id)}
        path: list[Message] = []
        while at in every:  # removed by another process: the rest of the branch is gone with it
            path.append(every[at])
            at = every[at].parent_id
        return path[::-1]

    def alternatives(self, message: Message) -> list[int]:
        """Ids of the messages that share `message`'s place, itself included, oldest first."""
        rows = self.db.rows(
            "SELECT id FROM messages WHERE session_id = ? AND parent_id IS ? ORDER BY id",
            *(message.session_id, message.parent_id),
        )
        return [row["id"] for row in rows]

    def activate(self, message: Message) -> Session:
        """Show the branch through `message`, down to the newest message below it."""
        rows = self.db.rows(f"{_BELOW} SELECT max(id) AS leaf FROM below", message.id)
        return self._change(message.session_id, active_leaf=rows[0]["leaf"])

    def reveal(self, message: Message) -> Session:
        """As `activate`, but the active branch stays if `message` is on it."""
        if any(shown.id == message.id for shown in self.branch(message.session_id)):
            return self.session(message.session_id)
        return self.activate(message)

    def recover(self, session_id: str) -> None:
        """Fold what a killed process wrote into its message, so that searching finds it too."""
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
        """Nothing is added to what another process deleted while it was open here."""
        if row is not None and not self.db.rows(f"SELECT 1 FROM {table} WHERE id = ?", row):
            what = table.removesuffix("s")
            raise DeletedError(f"this {what} was deleted elsewhere", "open the session again, or begin another")

    def _refuse_damaged(self, message_id: int) -> None:
        """What is left of a damaged message stays as it is: somebody may still mend the file."""
        if damaged := self.message(message_id).damaged:
            raise SessionError(f"message {message_id} is damaged ({', '.join(damaged)}) and stays as it is", _SALVAGE)

    def _change(self, session_id: str, **columns: object) -> Session:
        assignments = ", ".join(f"{name} = ?" for name in columns)
        with self.db.transaction():
            if damaged := set(self.session(session_id).damaged) & {*columns}:
                what = ", ".join(sorted(damaged))
                raise SessionError(f"session {session_id} is damaged ({what}) and stays as it is", _SALVAGE)
            self.db.run(f"UPDATE sessions SET {assignments} WHERE id = ?", *columns.values(), session_id)
        return self.session(session_id)


def database_path() -> Path:
    """Where the sessions are."""
    return data_dir() / "sessions.db"


def _title(content: str, attachments: Sequence[Attachment]) -> str:
    """The first line that shows anything; of a message that is only files, their names."""
    lines = (line.strip() for line in content.splitlines())
    shown = (line for line in lines if any(character.isprintable() and not character.isspace() for character in line))
    line = next(shown, ", ".join(attachment.name for attachment in attachments))
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"
