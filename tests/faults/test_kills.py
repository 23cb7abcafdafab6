"""4 SIGKILLs of the engine at random moments of a chat. `python -m tests.fuzz.kills` does as many as one likes.

Several at a time, so that the machine's cores are kept busy. No kill may lose of an answer what the chat had received,
or leave a process behind.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.app.chat.conversation import Conversation
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.events import Delta, Died, Event
from headrace.app.sessions.database import Database, storable
from headrace.app.sessions.store import SessionStore
from tests.faults.trace import generated, trace_engines
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

LANES = 4
ENGINE_KILLS = 4


def in_lanes(lane: Callable[[int], None]) -> None:
    """Run LANES of these at once; the first failure counts."""
    with ThreadPoolExecutor(LANES) as pool:
        for future in [pool.submit(lane, number) for number in range(LANES)]:
            future.result()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat", context=1_000_000)


def wait(chat: Conversation, true: Callable[[], bool]) -> list[Event]:
    """Poll until it is true; return the events."""
    deadline = time.monotonic() + PATIENCE_S
    events: list[Event] = []
    while not true():
        events += chat.poll()
        assert time.monotonic() < deadline
        time.sleep(0.003)
    return events


def test_a_killed_engine_loses_no_text(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    trace_engines(monkeypatch)
    died, answered = kill_engines(tmp_path, model, ENGINE_KILLS)
    assert died  # kills during an answer, all of which is still there
    assert answered


def kill_engines(folder: Path, model: Path, kills: int, seed: int = 0) -> tuple[int, int]:
    """Kill so many engines; return the numbers of cut-off answers, and of those with text."""
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
            chat.branch.set_sampling({"max_tokens": 4})
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
    session = store.create(sampling={"temperature": 1.0, "max_tokens": 1_000_000, "logit_bias": {str(IM_END): -100}})
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
