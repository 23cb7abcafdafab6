"""Sessions in a read-only folder: reading works, changes are refused with a hint."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.app.sessions.store import SessionStore
from tests.support.patience import PATIENCE_S

# Root may write anywhere, unless that is taken from it.
_AS_ANYONE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
pytestmark = pytest.mark.skipif(
    bool(_AS_ANYONE) and shutil.which("setpriv") is None, reason="root can write everywhere, and setpriv is not there"
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home with a question in it; read-only from `lock` on."""
    home = tmp_path / "what? a#home %41"
    store = SessionStore(home / "data" / "sessions.db")
    store.add(store.create().id, None, "user", "Where is the mill?")
    store.close()
    yield home
    for folder in (home, *filter(Path.is_dir, home.rglob("*"))):
        folder.chmod(0o755)


def lock(home: Path) -> None:
    for path in (*home.rglob("*"), home):
        path.chmod(0o555 if path.is_dir() else 0o444)


def sessions(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_AS_ANYONE, sys.executable, "-m", "headrace", "sessions", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )


@pytest.mark.sampled
@pytest.mark.parametrize("command", [["list"], ["show", "last"], ["search", "mill"], ["export", "last"]])
def test_existing_sessions_can_be_read(home: Path, command: list[str]) -> None:
    lock(home)
    done = sessions(home, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mill" in done.stdout
    assert [path.name for path in (home / "data").iterdir()] == ["sessions.db"]


@pytest.mark.sampled
@pytest.mark.parametrize("command", [["rm", "last", "--yes"], ["rename", "last", "Another"]])
def test_a_change_is_refused_with_a_hint(home: Path, command: list[str]) -> None:
    lock(home)
    done = sessions(home, *command)
    assert (done.returncode, done.stdout) == (1, "")
    assert "readonly" in done.stderr
    assert "hint: the file and its folder must be writable" in done.stderr


@pytest.mark.parametrize("made", [True, False])
def test_a_missing_store_in_a_read_only_folder_counts_as_empty(tmp_path: Path, made: bool) -> None:
    home = tmp_path / "home"
    (home / "data" if made else home).mkdir(parents=True)
    lock(home)
    try:
        listed = sessions(home, "list")
        done = sessions(home, "rename", "last", "Another")
    finally:
        for folder in (home, *home.rglob("*")):
            folder.chmod(0o755)
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "", "no conversations yet\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: the file and its folder must be writable; HEADRACE_HOME=DIR" in done.stderr


def test_a_store_that_another_process_writes_is_not_read_as_immutable(home: Path) -> None:
    """Its newest messages are in the WAL file only."""
    store = SessionStore(home / "data" / "sessions.db")
    store.add(store.sessions()[0].session.id, None, "user", "Upstream.")
    lock(home)
    done = sessions(home, "search", "upstream")
    store.close()
    assert (done.returncode, done.stderr) == (0, "")
    assert "«Upstream»" in done.stdout


def test_a_chat_continues_with_a_temporary_copy(home: Path) -> None:
    lock(home)
    script = (
        "from headrace.app.sessions.unsaved import store_for_chat\n"
        "with store_for_chat() as store:\n"
        "    session = store.find('last')\n"
        "    store.add(session.id, session.active_leaf, 'user', 'And now?')\n"
        "    print(len(store.branch(session.id)), store.db.path.exists(), store.unsaved)\n"
        "print(store.db.path.exists())\n"
    )
    done = subprocess.run(
        [*_AS_ANYONE, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )
    assert done.stderr == ""
    path = home / "data" / "sessions.db"
    assert done.stdout == f"2 True this chat is not saved: {path} cannot be written\nFalse\n"
    assert "And now?" not in sessions(home, "show", "last").stdout
