"""A damaged sessions file: damage is reported, the rest stays readable, nothing is overwritten.

Rows and pages are changed from a fixed seed; what comes out of a store are records or SessionErrors.
"""

import json
import random
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.app.chat.session_branch import SessionBranch
from headrace.app.cli.sessions import sessions as command
from headrace.app.sessions.examine import examine
from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import HeadraceError, SessionError
from tests.support.damaged_sessions import (
    change,
    changed_pages,
    damage_row,
    mutation,
    or_nothing,
    rows_of,
    use,
    write_sound,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions of three turns, one answer unfinished."""
    return write_sound(tmp_path_factory.mktemp("sound") / "sessions.db")


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copy(sound, tmp_path / "sessions.db"))


def try_rows(sound: Path, folder: Path, seed: int, count: int) -> int:
    """Return how many of `count` damaged rows SQLite accepted."""
    with closing(SessionStore(sound)) as store:
        before = use(store)
    tried = 0
    chance = random.Random(seed)
    for _ in range(count):
        table, column, place, value = mutation(chance)
        path = Path(shutil.copy(sound, folder / "sessions.db"))
        if (row := damage_row(path, table, column, place, value)) is None:
            continue
        tried += 1
        stored = rows_of(path)
        with closing(SessionStore(path)) as store:
            after = use(store)
            if table != "pieces":
                changed = {key for key in before if after.get(key) != before[key]}
                assert changed <= ({row} if table == "messages" else set()), (column, value, changed)
            assert rows_of(path) == stored, (table, column, value)
            for entry in or_nothing(store.sessions):
                with suppress(HeadraceError):
                    SessionBranch(store, entry.session)
        path.unlink()
    return tried


def try_pages(sound: Path, folder: Path, seed: int, count: int) -> int:
    """Return how many of `count` files with changed bytes could be opened."""
    chance = random.Random(seed)
    content = sound.read_bytes()
    opened = 0
    for _ in range(count):
        path = folder / "sessions.db"
        path.write_bytes(changed_pages(chance, content))
        with suppress(SessionError), closing(SessionStore(path)) as store:
            opened += 1
            use(store)
        for file in folder.iterdir():
            file.unlink()
    return opened


def test_damaged_rows_damage_nothing_else(sound: Path, tmp_path: Path) -> None:
    assert try_rows(sound, tmp_path, seed=16, count=30) > 10


def test_damaged_pages_are_our_own_errors(sound: Path, tmp_path: Path) -> None:
    assert try_pages(sound, tmp_path, seed=16, count=30) > 10


def test_a_damaged_message_is_shown_and_not_rewritten(damaged: Path) -> None:
    change(damaged, "UPDATE messages SET content = CAST(? AS TEXT), figures = '{' WHERE id = 4", b"half \xff\xfe")
    with closing(SessionStore(damaged)) as store:
        message = store.message(4)
        assert message.content == "half \ufffd\ufffd"
        assert (message.partial, message.finish_reason) == (True, "damaged")
        assert set(message.damaged) == {"content", "figures"}
        assert len(store.branch(message.session_id)) == 6
        before = rows_of(damaged)
        for write in (lambda: store.reopen(message), lambda: store.finish(4, "stop")):
            with pytest.raises(SessionError, match="message 4 is damaged"):
                write()
        assert rows_of(damaged) == before


def test_a_damaged_setting_is_not_written_over(damaged: Path) -> None:
    change(damaged, 'UPDATE sessions SET sampling = \'{"temperature": "hot"}\'')
    with closing(SessionStore(damaged)) as store:
        session = store.find("last")
        assert (session.sampling, session.damaged) == ({}, ("sampling",))
        with pytest.raises(SessionError, match="sampling"):
            store.set_sampling(session.id, {"temperature": 0.1})
        assert store.rename(session.id, "new").title == "new"


def test_a_cycle_of_parents_in_the_store_is_reported_as_damage(damaged: Path) -> None:
    change(damaged, "UPDATE messages SET parent_id = 6 WHERE id = 1")
    with closing(SessionStore(damaged)) as store:
        first = store.message(1)
        assert first.damaged == ("parent_id",)
        assert [message.id for message in store.branch(first.session_id)] == [1, 2, 3, 4, 5, 6]
        assert store.below(first) == 5


def test_doctor_reports_lost_rows_and_recovers_the_rest(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    shutil.copy(damaged, home / "data" / "sessions.db")
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    assert "12 messages" in CliRunner().invoke(command, ["doctor"], catch_exceptions=False).output
    change(home / "data" / "sessions.db", "UPDATE messages SET attachments = 'no' WHERE id = 3")
    result = CliRunner().invoke(command, ["doctor", "--export", str(tmp_path / "all.json")])
    assert isinstance(result.exception, SessionError)
    assert "message 3: attachments damaged" in result.output
    saved = json.loads((tmp_path / "all.json").read_text())
    assert sum(len(document["messages"]) for document in saved) == 12
    assert "question a1" in json.dumps(saved)


def test_a_stored_logit_bias_is_not_reported_as_damage(tmp_path: Path) -> None:
    bias = {"258": -100.0}
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        session = store.create(sampling={"logit_bias": bias})
        assert store.session(session.id).sampling == {"logit_bias": bias}
        assert not store.session(session.id).damaged


def test_a_session_whose_messages_are_unreadable_is_a_problem(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_store: SessionStore, session_id: str) -> list[Message]:
        raise SessionError(f"session {session_id} cannot be read")

    with closing(SessionStore(damaged)) as store:
        (first, *_) = store.sessions()
        monkeypatch.setattr(SessionStore, "messages", unreadable)
        assert f"session {first.session.id} cannot be read" in examine(store).problems
