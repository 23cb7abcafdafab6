"""28 SIGKILLs at random moments of a chat: 16 of the process that writes sessions, 12 of the engine.

`python -m tests.fuzz.kills` does as many as one likes.

Several of either at a time, so that the databases of killed writers are shared with living ones and the machine's
cores are kept busy. No kill may leave a database that cannot be read, lose a message that was complete, lose of a
growing one what the chat had received, or leave a process behind.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.app.chat.conversation import Conversation
from headrace.app.engine.client import EngineClient
from headrace.app.engine.messages import Delta, Died, Event, ModelSpec
from headrace.app.sessions.database import Database, storable
from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from tests.faults.trace import generated, trace_engines
from tests.tiny_chat import IM_END, write_chat_model

ROOT = Path(__file__).resolve().parent.parent.parent
LANES = 4
WRITER_KILLS, ENGINE_KILLS = 16, 12
PATIENCE_S = 60


def in_lanes(lane: Callable[[int], None]) -> None:
    """Run LANES of these at once; the first failure counts."""
    with ThreadPoolExecutor(LANES) as pool:
        for future in [pool.submit(lane, number) for number in range(LANES)]:
            future.result()


# --- the writer ----------------------------------------------------------------------------------------------


def promises_until_killed(database: Path, seed: int, seconds: float) -> list[str]:
    """Let a writer live for a while after its first promise; everything it promised."""
    command = [sys.executable, "-m", "tests.faults.chat_writer", str(database), str(seed)]
    # Unbuffered: `communicate` would not see what `readline` had read ahead.
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n", writer.communicate()
    first = writer.stdout.readline()
    killer = threading.Timer(seconds, writer.kill)
    killer.start()
    out, errors = writer.communicate()
    killer.join()
    assert (writer.returncode, errors) == (-signal.SIGKILL, b"")
    return [line for line in (first + out).decode().splitlines(keepends=True) if line.endswith("\n")]


def keeps(store: SessionStore, promises: list[str]) -> None:
    """Check the last promise about every message."""
    last = {line.split()[1]: line.split()[2:] for line in promises}
    for number, (length, crc, state) in last.items():
        message = store.message(int(number))
        kept = message.content if state == "whole" else message.content[: int(length)]
        assert (len(kept), zlib.crc32(kept.encode())) == (int(length), int(crc))
        if state == "whole" and message.role == "assistant":
            assert message.finish_reason is not None


def test_killing_the_writer(tmp_path: Path) -> None:
    database = tmp_path / "sessions.db"
    kept: list[list[str]] = [[] for _ in range(LANES)]

    def lane(number: int) -> None:
        choose = random.Random(number)
        for kill in range(WRITER_KILLS // LANES):
            promises = promises_until_killed(database, number * 1000 + kill, choose.uniform(0, 0.15))
            store = SessionStore(database)
            keeps(store, promises)
            store.close()
            kept[number] += promises

    in_lanes(lane)
    store = SessionStore(database)
    assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
    assert store.db.rows("PRAGMA foreign_key_check") == []
    promises = [line for lane_promises in kept for line in lane_promises]
    assert len(promises) >= WRITER_KILLS
    keeps(store, promises)
    for entry in store.sessions():
        store.recover(entry.session.id)
        assert store.branch(entry.session.id)
    assert store.db.rows("SELECT * FROM pieces") == []
    store.db.run("INSERT INTO message_index(message_index, rank) VALUES ('integrity-check', 1)")
    assert search(store, "wheel")
    store.close()


# --- the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat", context=1_000_000)


def wait(chat: Conversation, true: Callable[[], bool]) -> list[Event]:
    """Poll until it is true; what happened meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    events: list[Event] = []
    while not true():
        events += chat.poll()
        assert time.monotonic() < deadline
        time.sleep(0.003)
    return events


def test_killing_the_engine(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    trace_engines(monkeypatch)
    died, answered = kill_engines(tmp_path, model, ENGINE_KILLS)
    assert died > ENGINE_KILLS // 4  # kills during an answer, all of which is still there
    assert answered > ENGINE_KILLS // 4


def kill_engines(folder: Path, model: Path, kills: int, seed: int = 0) -> tuple[int, int]:
    """Kill so many, of HEADRACE_HOME folder/home: how many answers died, and of how many there was a beginning."""
    database = folder / "sessions.db"

    def lane(number: int) -> None:
        choose = random.Random(seed * LANES + number)
        store = SessionStore(database)
        client = EngineClient()
        client.start(ModelSpec(str(model), context=1_000_000))
        try:
            for _ in range(kills // LANES):
                killed_once(endless_chat(client, store), client, choose, folder / "home")
            chat = endless_chat(client, store)
            chat.set_sampling({"max_tokens": 4})
            chat.send("still well?")
            wait(chat, lambda: chat.phase == "idle")
            assert chat.messages[-1].finish_reason == "length"
        finally:
            client.close()
            store.close()

    in_lanes(lane)
    database_is_sound(Database(database))
    store = SessionStore(database)
    died = [m for entry in store.sessions() for m in store.messages(entry.session.id) if m.finish_reason == "died"]
    store.close()
    return len(died), sum(bool(message.content) for message in died)


def endless_chat(client: EngineClient, store: SessionStore) -> Conversation:
    session = store.create(sampling={"temperature": 1.0, "max_tokens": 1_000_000, "logit_bias": [f"{IM_END}=-100"]})
    return Conversation(client, store, session)


def killed_once(chat: Conversation, client: EngineClient, choose: random.Random, home: Path) -> None:
    """One question, one kill while it loads, prefills or answers, and a restart."""
    chat.send("hello " * choose.randrange(1, 30))
    events: list[Event] = []
    if choose.random() < 0.4:
        events += wait(chat, lambda: chat.phase == "answering" and chat.messages[-1].content != "")
    wait_until = time.monotonic() + choose.uniform(0, 0.2)
    events += wait(chat, lambda: time.monotonic() >= wait_until)
    shown = chat.messages
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    events += wait(chat, lambda: client.state == "dead")
    assert chat.phase == "idle"
    assert chat.notice is not None
    assert "SIGKILL" in chat.notice
    for before, after in zip(shown, chat.messages, strict=False):
        assert after.content.startswith(before.content)
    said = generated(home, pid)
    kept = "".join(message.content for message in chat.messages[1:])
    assert kept == storable("".join(event.text for event in events if isinstance(event, Delta)))
    assert "".join(said[-1] if said else []).startswith(kept)
    if chat.messages[-1].role == "assistant":
        assert (chat.messages[-1].partial, chat.messages[-1].finish_reason) == (True, "died")
    assert chat.messages == chat.store.branch(chat.session.id)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not any(isinstance(event, Died) for event in chat.poll())
    client.restart()


def database_is_sound(database: Database) -> None:
    assert [row[0] for row in database.rows("PRAGMA integrity_check")] == ["ok"]
    assert database.rows("SELECT * FROM pieces") == []
    database.close()
