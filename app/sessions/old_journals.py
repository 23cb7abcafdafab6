"""Answers that earlier versions left in journal files beside the store when they were killed.

Such a file is a line of JSON that says whose answer it is, then what the model said, up to the first NUL byte. Opening
the store adds to the message what it lacks of that, and removes the file. A chat of such a version that still runs
holds its file's lock, and keeps it.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.app.sessions.database import APPENDED, Database
from headrace.app.sessions.rows import is_sound


@dataclass(frozen=True, slots=True)
class Answer:
    """The file's first line. `begins`: characters that an answer which was continued had before."""

    session_id: str
    message_id: int  # perhaps of a message that was not made yet
    parent_id: int | None
    model: str | None
    begins: int = 0


def fold_old_journals(database: Database, folder: Path) -> None:
    """Complete the messages of all journals that nobody holds. Raises SessionError, OSError; may be repeated."""
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.journal")):
        with _held(path) as file:
            if file is None:
                continue
            head, _, text = os.pread(file, os.fstat(file).st_size, 0).partition(b"\0")[0].partition(b"\n")
            if said := text.decode("utf-8", "ignore"):  # which may end in half a character, or be no more than that
                try:
                    answer = _checked(Answer(**json.loads(head)))
                except (ValueError, TypeError, RecursionError):  # no journal
                    continue
                if not _complete(database, answer, said):
                    continue
            path.unlink(missing_ok=True)
    with suppress(OSError):  # one that is held, or that cannot be read
        folder.rmdir()


@contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """The open file, locked; None if somebody else has it, or has just removed it."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield None
    else:
        yield file if os.fstat(file).st_nlink else None
    finally:
        os.close(file)


def _checked(answer: Answer) -> Answer:
    numbers = (answer.message_id, answer.begins, 0 if answer.parent_id is None else answer.parent_id)
    texts = (answer.session_id, "" if answer.model is None else answer.model)
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return answer


def _complete(database: Database, answer: Answer, said: str) -> bool:
    """Give the message what it lacks; make it, if the chat did not come to do so. False for a damaged message."""
    with database.transaction(durable=True):
        rows = database.rows(
            f"SELECT content || {APPENDED} AS whole, finish_reason FROM messages WHERE id = ?", answer.message_id
        )
        if not rows and not _make(database, answer):
            return True  # the session was deleted
        stored = rows[0]["whole"] if rows else ""
        if not isinstance(stored, str) or not is_sound(stored):
            return False
        whole = stored[: answer.begins] + said
        # A reason to have finished means: killed between finishing the message and removing the journal.
        if (not rows or rows[0]["finish_reason"] is None) and whole.startswith(stored):
            piece = whole[len(stored) :]
            database.run("INSERT INTO pieces (message_id, text) VALUES (?, ?)", answer.message_id, piece)
    return True


def _make(database: Database, answer: Answer) -> bool:
    """The message, empty and partial; False if what it answers is not there any more."""
    if not database.rows("SELECT id FROM messages WHERE id = ?", answer.parent_id):
        return False
    now = time.time()
    database.run(
        "INSERT INTO messages (id, session_id, parent_id, role, content, created_at, partial, model)"
        " VALUES (?, ?, ?, 'assistant', '', ?, 1, ?)",
        *(answer.message_id, answer.session_id, answer.parent_id, now, answer.model),
    )
    database.run(
        "UPDATE sessions SET active_leaf = ?, updated_at = ? WHERE id = ?", answer.message_id, now, answer.session_id
    )
    return True
