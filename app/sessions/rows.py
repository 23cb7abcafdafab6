"""Records from rows of the sessions file, also of a damaged one.

An invalid value is left out, or shown as far as it is readable, and the record names its column in `damaged`. Nothing
is written back. `store.py` makes every record here; a new column is one more argument in `session_of` or `message_of`,
read by a method of `_StoredRow` that suits its type. `readable_sessions` and `readable_messages` read row by row, where
a query over all rows fails.

Guard: tests/app/sessions/test_damaged_store.py.
"""

import json
import sqlite3
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import astuple, replace

from headrace.app.answer.options import OPTIONS
from headrace.app.sessions.database import SELECT_MESSAGE, Database
from headrace.app.sessions.records import DAMAGED, EVERYTHING, Attachment, Draft, Message, Role, Session, SessionEntry
from headrace.models.text.thinking import Kinds, read_tags
from headrace.runtime.config.typed import typed
from headrace.runtime.config.value_types import Number, Whole
from headrace.runtime.errors import SessionError
from headrace.runtime.metrics.telemetry import Percentiles, Summary

T = TypeVar("T")
_LATEST = 2.0**37  # seconds since the epoch, the year 6325: within every system's calendar
_LARGEST = 2**63 - 1
_MAX_FLOAT = sys.float_info.max


class _StoredRow:
    """One row, read column by column. damaged: columns with invalid values."""

    def __init__(self, row: sqlite3.Row) -> None:
        self._values: dict[str, object] = dict(zip(row.keys(), row, strict=False))
        self.damaged: list[str] = []

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if isinstance(value, str) and is_sound(value):
            return value
        self.damaged.append(name)
        return readable(value)

    def optional_text(self, name: str) -> str | None:
        return None if self._values.get(name) is None else self.text(name)

    def time(self, name: str) -> float:
        return self._checked(name, lambda value: _number(value, _LATEST), 0.0)

    def id(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self._checked(name, _id, None)

    def flag(self, name: str) -> bool:
        return self._checked(name, _flag, True)

    def role(self, name: str) -> Role:
        return self._checked(name, _role, "assistant")

    def json(self, name: str, read: Callable[[object], T], default: T) -> T:
        """Return `read` of the JSON in this column; the default for NULL."""
        if self._values.get(name) is None:
            return default
        return self._checked(name, lambda value: read(_parsed(value)), default)

    def _checked(self, name: str, read: Callable[[object], T], default: T) -> T:
        try:
            return read(self._values.get(name))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self.damaged.append(name)
            return default


def session_of(row: sqlite3.Row) -> Session:
    """Return the session of a row of `sessions`."""
    values = _StoredRow(row)
    return Session(
        id=values.text("id"),
        title=values.text("title"),
        created_at=values.time("created_at"),
        updated_at=values.time("updated_at"),
        model=values.optional_text("model"),
        system=values.text("system"),
        sampling=values.json("sampling", _settings, {}),
        active_leaf=values.id("active_leaf"),
        prompt_from=values.id("prompt_from"),
        summary=values.text("summary"),
        draft=values.json("draft", _draft, Draft()),
        damaged=tuple(values.damaged),
    )


def message_of(row: sqlite3.Row) -> Message:
    """Return the message of a row of `messages` that has its full text as `whole`.

    A damaged message is partial, with DAMAGED as its `finish_reason`.
    """
    values = _StoredRow(row)
    number = values.id("id") or 0
    parent = values.id("parent_id")
    if parent is not None and parent >= number:  # parents are older; otherwise it could be a cycle
        values.damaged.append("parent_id")
        parent = None
    role = values.role("role")
    content = values.text("whole")
    kinds = None
    if role == "assistant":
        kinds = values.json("kinds", _kinds, None)
        if kinds is None or sum(kinds) != len(content):  # after a crash, or damage
            kinds = read_tags(content).kinds
    message = Message(
        id=number,
        session_id=values.text("session_id"),
        parent_id=parent,
        role=role,
        content=content,
        created_at=values.time("created_at"),
        partial=values.flag("partial"),
        finish_reason=values.optional_text("finish_reason"),
        model=values.optional_text("model"),
        metrics=values.json("figures", _summary, None),
        attachments=values.json("attachments", _attachments, ()),
        sampling=values.json("sampling", _settings, None),
        system=values.optional_text("system"),
        kinds=kinds,
    )
    values.text("content")  # `whole` does not show bytes instead of text
    return marked(message, values.damaged)


def marked(message: Message, damaged: Collection[str]) -> Message:
    """Return the message with these columns added to `damaged`."""
    if not damaged:
        return message
    columns = dict.fromkeys(message.damaged)
    for name in damaged:
        columns["content" if name == "whole" else name] = None
    return replace(message, partial=True, finish_reason=DAMAGED, damaged=tuple(columns))


# -- row by row. INDEXED BY has SQLite read an index in place of the table: damage mostly is in one of them ------------


def readable_sessions(db: Database) -> list[SessionEntry]:
    """Return the sessions with messages, the last used first, without unreadable rows."""
    counts = db.rows(
        "SELECT session_id, count(*) AS messages FROM messages INDEXED BY messages_by_session GROUP BY session_id"
    )
    entries: list[SessionEntry] = []
    for row in counts:
        with suppress(SessionError):  # one at a time, so that a damaged page hides its own rows alone
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
            messages.append(_lost_message(number, session_id, parent))
    return messages


def _lost_message(number: int, session_id: str, parent: int | None) -> Message:
    """Return a placeholder for an unreadable row."""
    return Message(number, session_id, parent, "assistant", "", 0.0, True, DAMAGED, damaged=(EVERYTHING,))


# -- values ------------------------------------------------------------------------------------------------------------


def is_sound(text: str) -> bool:
    """True if the file's bytes were valid UTF-8 (see `database.text_of`)."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def readable(value: object) -> str:
    """Return the readable text of a value."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)


def _parsed(value: object) -> object:
    if not isinstance(value, str) or not is_sound(value):
        raise TypeError
    return json.loads(value)


def _number(value: object, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ValueError
    return float(value)


def _id(value: object) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST:
        raise ValueError
    return value


def _flag(value: object) -> bool:
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _role(value: object) -> Role:
    if value == "user":
        return "user"
    if value != "assistant":
        raise ValueError
    return "assistant"


def _kinds(value: object) -> Kinds:
    kinds = typed(Kinds, value)
    if min(kinds) < 0:
        raise ValueError
    return kinds


def _settings(value: object) -> dict[str, object]:
    """Return settings of finite numbers, texts, lists of texts and logit biases."""
    if not isinstance(value, dict) or not all(map(_is_setting, value, value.values())):
        raise ValueError
    return value


def _is_setting(name: str, value: object) -> bool:
    """Return whether a setting has the type of its option; one that is no option, any plain one.

    Ranges are not checked here: `app.chat.answer_setup.stored_options` refuses values out of range when they are used.
    """
    if value is None:
        return _is_text(name)
    if name == "stop":
        return isinstance(value, list) and all(map(_is_text, value))
    kind = OPTIONS[name].kind if name in OPTIONS else None
    if isinstance(kind, Whole):
        return type(value) is int and _is_finite(value)
    if isinstance(kind, Number):
        return _is_finite(value)
    if name == "logit_bias":
        return isinstance(value, dict) and all(key.isdecimal() and _is_finite(bias) for key, bias in value.items())
    return _is_text(name) and (isinstance(value, bool) or _is_finite(value) or _is_text(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_sound(value)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**64


def _summary(value: Any) -> Summary:
    """Return a stored summary, of numbers in range."""
    summary = typed(Summary, value)
    for figure in astuple(summary):
        numbers = astuple(figure) if isinstance(figure, Percentiles) else (figure,)
        if not all(number is None or 0 <= number <= _largest(number) for number in numbers):
            raise ValueError
    return summary


def _largest(figure: float) -> float:
    return _LARGEST if isinstance(figure, int) else _MAX_FLOAT


def _draft(value: object) -> Draft:
    draft = typed(Draft, value)
    texts = [draft.text, *draft.pastes, *draft.pastes.values()]
    if not all(map(_is_text, texts)) or "" in draft.pastes:
        raise ValueError
    return draft


def _attachments(value: object) -> tuple[Attachment, ...]:
    attachments = typed(tuple[Attachment, ...], value)
    if not all(_is_text(attachment.name) and _is_text(attachment.text) for attachment in attachments):
        raise ValueError
    return attachments
