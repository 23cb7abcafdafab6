"""One session open in two processes: both detect it, and neither changes the other's branch."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headrace.app.chat.session_branch import SessionBranch
from headrace.app.sessions.store import SessionStore

HOLD = """
import sys
from pathlib import Path
from headrace.app.sessions.presence import Presence
print(Presence(Path(sys.argv[1])).open(sys.argv[2]), flush=True)
sys.stdin.read()
"""


# Holds the exclusive lock of `Presence.open` until a line comes, for longer than that does, then the shared lock.
HOLD_ALONE = """
import fcntl, os, sys
from zlib import crc32
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
byte = crc32(sys.argv[2].encode()) & 0x7FFFFFFF
fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
print("alone", flush=True)
if sys.stdin.readline():
    fcntl.lockf(file, fcntl.LOCK_SH, 1, byte)
    print("shared", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(store: Path, session_id: str) -> Iterator[bool]:
    """Open the session in another process; return whether that detects it as shared."""
    command = [sys.executable, "-c", HOLD, str(store.with_suffix(".open")), session_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip() == "True"


def test_a_session_counts_as_shared_until_the_other_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = SessionStore(path)
    here = store.create()
    other = store.create()
    assert not store.hold(here.id)
    with held_elsewhere(path, here.id) as seen:
        assert seen
        assert store.hold(here.id)
        assert not store.hold(other.id)
        assert store.hold(here.id)
    assert not store.hold(here.id)
    store.close()


@contextmanager
def held_alone(store: Path, session_id: str) -> Iterator["subprocess.Popen[str]"]:
    """Hold the exclusive lock of the session in another process."""
    command = [sys.executable, "-c", HOLD_ALONE, str(store.with_suffix(".open")), session_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alone\n"
        yield process


def test_a_session_that_another_process_is_opening_counts_as_shared(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionStore(path)) as store:
        session = store.create()
        with held_alone(path, session.id):
            assert store.hold(session.id)
        assert not store.hold(session.id)


def test_a_session_opened_at_once_with_another_process_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionStore(path)) as store:
        session = store.create()
        with held_alone(path, session.id) as process:

            def share(_seconds: float) -> None:
                """Let the other process go on, instead of sleeping."""
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "shared\n"

            monkeypatch.setattr("headrace.app.sessions.presence.sleep", share)
            assert store.hold(session.id)
        with held_elsewhere(path, session.id) as shared:  # the first other process has ended
            assert shared


def test_messages_of_another_process_do_not_change_the_shown_branch(tmp_path: Path) -> None:
    here = SessionStore(tmp_path / "sessions.db")
    there = SessionStore(tmp_path / "sessions.db")
    session = here.create()
    question = here.add(session.id, None, "user", "why?")
    shown = SessionBranch(here, here.session(session.id))
    there.add(session.id, None, "user", "said there")
    shown.reload(question.id)
    assert [message.content for message in shown.messages] == ["why?"]
    for store in (here, there):
        store.close()
