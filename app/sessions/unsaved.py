"""A temporary copy of the sessions, for a chat that cannot write to them: a read-only folder or file.

`headrace chat` opens its store here. A disk that becomes full later is another case (`SessionStore.go_unsaved`).

Guard: tests/app/sessions/test_read_only.py.
"""

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from headrace.app.sessions.store import SessionStore, database_path
from headrace.runtime.errors import SessionError


@contextmanager
def store_for_chat() -> Iterator[SessionStore]:
    """Open the user's sessions, or a temporary copy if they are read-only, with the reason in `unsaved`.

    Raises SessionError if neither is possible.
    """
    path = database_path()
    if _can_be_written(path):
        with closing(SessionStore(path)) as store:
            yield store
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="headrace-")
    except OSError as error:
        raise SessionError(f"{path} cannot be written, and there is no temporary folder: {error.strerror}") from error
    with folder:
        copy = Path(folder.name) / path.name
        _copy(path, copy)
        with closing(SessionStore(copy)) as store:
            store.unsaved = f"this chat is not saved: {path} cannot be written"
            yield store


def _can_be_written(path: Path) -> bool:
    """True if the file, if it exists, and its folder are writable."""
    folder = next(parent for parent in path.parents if parent.exists())
    return os.access(folder, os.W_OK | os.X_OK) and (not path.exists() or os.access(path, os.W_OK))


def _copy(path: Path, copy: Path) -> None:
    """Copy the file, if it is readable."""
    if not path.is_file():
        return
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as old,
        closing(sqlite3.connect(copy)) as new,
    ):
        old.backup(new)
