"""`headrace sessions` and `headrace paths` as a user runs them: a process of its own, in a home of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.app.cli.say import print_json
from headrace.app.sessions.records import Attachment
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import UsageError
from tests.support import commands
from tests.support.summaries import make_summary

METRICS = make_summary(mbu=0.31)
EVIL = "\x1b]52;c;ZXZpbA==\x07\u202etxet\x9b31m"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> SessionStore:
    return SessionStore(home / "data" / "sessions.db")


@pytest.fixture
def session(store: SessionStore) -> str:
    """Two branches; the shown one has thinking, an attachment and text that attacks terminals."""
    session = store.create(model="qwen3-4b", system="Be brief.")
    asked = store.add(
        session.id, None, "user", f"What is a millrace? {EVIL}", attachments=[Attachment("n.txt", "text")]
    )
    first = store.begin_answer(session.id, asked.id, "m")
    store.grow(first.id, "A discarded answer.")
    store.finish(first.id, "stop", METRICS)
    second = store.begin_answer(session.id, asked.id, "m")
    store.grow(second.id, f"<think>\nhm\n</think>\n\nA channel.{EVIL}\n")
    store.finish(second.id, "cancelled", METRICS, partial=True)
    store.close()
    return session.id


def headrace(home: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = commands.headrace(*arguments, home=home, code=code)
    assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr)
    return done


def document(home: Path, *arguments: str) -> Any:
    return json.loads(headrace(home, "sessions", *arguments, "--json").stdout)


def test_sessions_are_listed_with_title_and_model(home: Path, session: str) -> None:
    line = headrace(home, "sessions", "list").stdout
    assert line.startswith(session)
    assert "What is a millrace?" in line
    assert "qwen3-4b" in line
    (row,) = document(home, "list")
    assert (row["id"], row["messages"], row["system"]) == (session, 3, "Be brief.")


def test_sessions_doctor_counts_conversations_and_messages(home: Path, store: SessionStore) -> None:
    session = store.create()
    asked = store.add(session.id, None, "user", "one alone")
    assert headrace(home, "sessions", "doctor").stdout == "1 conversation with 1 message\n"
    store.add(session.id, asked.id, "user", "and another")
    assert headrace(home, "sessions", "doctor").stdout == "1 conversation with 2 messages\n"


def test_an_empty_store_lists_no_sessions(home: Path) -> None:
    done = headrace(home, "sessions", "list")
    assert (done.stdout, done.stderr) == ("", "no conversations yet\n")
    assert document(home, "list") == []
    assert "no conversation has been kept yet" in headrace(home, "sessions", "show", "last", code=2).stderr


def test_a_session_is_shown_and_exported(home: Path, session: str, tmp_path: Path) -> None:
    shown = headrace(home, "sessions", "show", session[:5]).stdout
    assert "A channel." in shown
    assert "A discarded answer." not in shown
    assert "<details><summary>Thinking</summary>\n\nhm\n\n</details>" in shown
    assert "*Attached: n.txt*" in shown
    assert "*Not complete: cancelled.*" in shown
    assert "7 tokens · 150 tok/s · TTFT 50.0 ms · MBU 31 % · prompt 20 (12 cached)" in shown
    file = tmp_path / "chat.md"
    headrace(home, "sessions", "export", "last", "-o", str(file))
    assert file.read_text() == shown
    assert "exists already" in headrace(home, "sessions", "export", "last", "-o", str(file), code=2).stderr
    headrace(home, "sessions", "export", "last", "-o", str(file), "--format", "json", "--force")
    exported = json.loads(file.read_text())
    assert exported == document(home, "show", "last")
    assert [m["content"] for m in exported["messages"]][1] == "A discarded answer."
    assert [m["parent_id"] for m in exported["messages"]] == [None, *[exported["messages"][0]["id"]] * 2]
    assert EVIL in exported["messages"][2]["content"]


def test_search_finds_words_in_messages(home: Path, session: str) -> None:
    line = headrace(home, "sessions", "search", "millr", "what").stdout
    assert line.startswith(session)
    assert "«millrace»" in line
    (hit,) = document(home, "search", "discarded")
    assert (hit["session_id"], hit["role"]) == (session, "assistant")
    assert headrace(home, "sessions", "search", "nowhere", code=1).stderr == "headrace: nothing found\n"
    for long in ("x" * 60_000, "a b " * 5_000):
        assert "characters long (limit 1000)" in headrace(home, "sessions", "search", long, code=1).stderr


def test_a_session_is_renamed_and_removed(home: Path, session: str) -> None:
    headrace(home, "sessions", "rename", session, "mills")
    assert document(home, "list")[0]["title"] == "mills"
    assert "--yes" in headrace(home, "sessions", "rm", session, code=2).stderr
    kept = home / "cache" / "chats" / "block"
    kept.parent.mkdir(parents=True)
    kept.write_text("what was said")
    assert headrace(home, "sessions", "rm", session, "--yes").stdout == f"deleted {session}\n"
    assert not kept.exists()
    assert document(home, "list") == []


def test_kv_on_disk_that_cannot_be_deleted_is_an_error(home: Path, session: str) -> None:
    folder = home / "cache" / "chats"
    (folder / "a folder").mkdir(parents=True)  # no file, so it cannot be unlinked, also by root
    (folder / "z").write_text("what was said")
    failed = headrace(home, "sessions", "rm", session, "--yes", code=1).stderr
    assert failed.startswith("headrace: K/V on disk, with the text of conversations, cannot be deleted")
    assert str(folder) in failed
    assert [file.name for file in folder.iterdir()] == ["a folder"]
    assert document(home, "list") == []


def test_the_paths_of_files_are_printed(home: Path) -> None:
    lines = headrace(home, "paths").stdout.splitlines()
    assert len(lines) == 7
    assert all(str(home) in line and line.endswith("(not created yet)") for line in lines)
    places = json.loads(headrace(home, "paths", "--json", "--write-settings").stdout)
    assert set(places) == {"settings", "presets", "sessions", "models", "cache", "kept_chats", "engine_log"}
    assert Path(places["settings"]).read_text().startswith("# headrace settings.")
    assert "exists already" in headrace(home, "paths", "--write-settings").stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_paths_that_are_not_utf_8_are_printed_but_not_in_json(tmp_path: Path) -> None:
    home = tmp_path / os.fsdecode(b"\xff")
    refused = headrace(home, "paths", "--json", code=2)
    assert refused.stdout == ""
    assert "is not UTF-8" in refused.stderr
    command = [*commands.HEADRACE, "paths"]
    shown = subprocess.run(command, env={**os.environ, "HEADRACE_HOME": str(home)}, check=True, capture_output=True)
    assert os.fsencode(home) in shown.stdout


def test_a_document_with_text_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"emoji": "\U0001f642", "escape": "\\ud800"})
    assert json.loads(capsys.readouterr().out) == {"emoji": "\U0001f642", "escape": "\\ud800"}
    with pytest.raises(UsageError, match=r"^m.ll is not UTF-8"):
        print_json({"emoji": "\U0001f642", "files": [{"name": "m\udcffll"}]})
    assert capsys.readouterr().out == ""


def test_listing_and_paths_import_nothing_heavy(home: Path) -> None:
    script = (
        "import sys; from headrace.app.cli.commands import cli\n"
        "for command in (['sessions', 'list'], ['paths']): cli.main(command, standalone_mode=False)\n"
        "assert not {'mlx', 'textual', 'numpy', 'tokenizers', 'rich'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "HEADRACE_HOME": str(home)}, capture_output=True
    )
