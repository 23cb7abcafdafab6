"""One session open in two processes: both detect it, and neither changes the other's branch."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headrace.app.chat.session_branch import SessionBranch
from headrace.app.sessions.store import SessionStore

HOLD = """
import sys
from pathlib import Path
from headrace.app.sessions.presence import Presence
print(Presence(Path(sys.argv[1])).open(sys.argv[2]), flush=True)
sys.stdin.read()
"""


# Holds the exclusive lock of `Presence.open`, for longer than that does.
HOLD_ALONE = """
import fcntl, os, sys
from zlib import crc32
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(file, fcntl.LOCK_EX, 1, crc32(sys.argv[2].encode()) & 0x7FFFFFFF)
print("held", flush=True)
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


def test_two_processes_that_open_a_session_at_once_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionStore(path)) as store:
        session = store.create()
        command = [sys.executable, "-c", HOLD_ALONE, str(path.with_suffix(".open")), session.id]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            assert store.hold(session.id)
        assert not store.hold(session.id)


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
