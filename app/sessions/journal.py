"""The journal of an answer: what the model says, on its way into the session store, where no crash can lose it.

The chat makes one small file for each answer it asks for: a line of JSON that says whose answer it is, then the text.
The engine's process puts every piece there as the detokenizer gives it, before it sends anything, and writes the file's
pages as memory: they are the kernel's and outlive a SIGKILL of either process, and a system call for every token takes
from the decode. The room is written full of NUL first, so that a full disk is an error and no fault of a page; the text
ends at the first NUL.

The chat needs the file only where the engine did not come to send the rest, and removes it once the message is
finished. It holds the file's lock as long as it lives: a journal without a holder is what a killed chat left. Whoever
opens the store next folds such a journal into its message. Folding compares before it adds, so it may be killed and
repeated at any point; the lock keeps others away.
"""

import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.app.sessions.store import SessionStore

_ROOM = 1 << 16  # bytes made ready at a time


@dataclass(frozen=True, slots=True)
class Answer:
    """Whose journal it is. `begins`: characters that an answer which is continued had before."""

    session_id: str
    message_id: int  # reserved where the message is not in the store yet
    parent_id: int | None
    model: str | None
    begins: int = 0


class Journal:
    """A journal that this process holds."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        """Make the file. Raises OSError where files cannot be made or locked."""
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = folder / f"{answer.session_id}-{answer.message_id}-{secrets.token_hex(4)}.journal"
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if os.fstat(self._file).st_nlink:  # else somebody took it for abandoned before it was locked
                    os.write(self._file, json.dumps(asdict(answer)).encode() + b"\n")
                    return
            except OSError:
                self.remove()
                raise
            os.close(self._file)

    def text(self) -> str:
        """Everything the engine has said so far."""
        return _read(self._file)[1]

    def remove(self) -> None:
        """The message is finished in the store."""
        with suppress(OSError):
            self.path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Leave it to whoever opens the store next."""
        os.close(self._file)


class JournalWriter:
    """The engine's end. Where the disk is full it gives up: a journal is never without its middle."""

    def __init__(self, path: str | None) -> None:
        """None writes nowhere."""
        self._file: int | None = None
        self._pages: mmap.mmap | None = None
        self._room = 0  # bytes that the pages have
        self._end = 0  # of what is written
        if path is not None:
            with suppress(OSError):
                self._file = os.open(path, os.O_RDWR)
                self._end = len(written(self._file))

    def write(self, text: str) -> None:
        """Append a piece."""
        if self._file is None or not text:
            return
        data = _storable(text)
        end = self._end + len(data)
        try:
            if end > self._room or self._pages is None:
                self._pages = self._make_room(self._file, end)
        except (OSError, ValueError):  # a full disk; no file that has pages
            self.close()
        else:
            self._pages[self._end : end] = data
            self._end = end

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _make_room(self, file: int, least: int) -> mmap.mmap:
        """The file's pages, for `least` bytes and more. Raises OSError where the disk has no room for them."""
        if self._pages is not None:
            self._pages.close()
        room = least + _ROOM
        missing = bytes(room - self._end)
        if os.pwrite(file, missing, self._end) < len(missing):
            raise OSError("the disk is full")
        self._room = room
        return mmap.mmap(file, room)


def storable(text: str) -> str:
    """Text without NUL, which SQLite's text functions stop at, and without lone surrogates, which are no Unicode."""
    return _storable(text).decode()


def _storable(text: str) -> bytes:
    return text.replace("\0", "\ufffd").encode("utf-8", "replace")


def fold_abandoned(store: "SessionStore", folder: Path) -> None:
    """Complete the messages of all journals that nobody holds, and remove these. Raises SessionError.

    A journal that somebody else is folding at this moment is folded when this returns.
    """
    with _one_at_a_time(folder):
        for path in sorted(folder.glob("*.journal")):
            with _held(path) as file:
                if file is not None:
                    answer, text = _read(file)
                    if answer is not None and text:
                        _complete(store, answer, text)
                    path.unlink(missing_ok=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for whoever else is folding; where there is no folder, or are no locks, there is nothing to fold."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """The open file, locked; None if a living chat has it, or has just removed it."""
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


def _read(file: int) -> tuple[Answer | None, str]:
    """Whose answer it is, None if not even that was written; and the text, without half a character at its end."""
    head, _, text = written(file).partition(b"\n")
    try:
        answer = Answer(**json.loads(head))
    except (ValueError, TypeError):
        answer = None
    return answer, text.decode("utf-8", "ignore")


def written(file: int) -> bytes:
    """Everything up to the room that was not used."""
    return os.pread(file, os.fstat(file).st_size, 0).partition(b"\0")[0]


def _complete(store: "SessionStore", answer: Answer, text: str) -> None:
    """Give the message what it lacks of `text`; make it, if the chat did not come to do so."""
    messages = {message.id: message for message in store.messages(answer.session_id)}
    message = messages.get(answer.message_id)
    if message is None:
        if answer.parent_id not in messages:
            return  # the session was deleted
        message = store.begin_answer(answer.session_id, answer.parent_id, answer.model, answer.message_id)
    whole = message.content[: answer.begins] + text
    # A reason to have finished means: killed between finishing the message and removing the journal.
    if message.finish_reason is None and whole.startswith(message.content):
        store.append(message.id, whole[len(message.content) :])
