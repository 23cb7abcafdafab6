"""SIGKILL of the chat's own process, the screen included, at random moments from its start to the middle of a talk.

The real program on a pseudo-terminal with a tiny model, which is typed at as fast as it answers, killed, and resumed
where it was, again and again. No kill may leave a database that cannot be read, lose a question that the screen
showed, lose of an answer what it had in the store a moment before, or leave an engine behind.

A few kills in the ordinary run; `python -m tests.fuzz.kills chat` makes more.
"""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from tests.faults.chat_terminal import Chat
from tests.faults.trace import generated, trace_engines
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines
from tests.support.tiny_chat import IM_END, write_chat_model

KILLS = 4
LANES, LIVES = 2, 10  # at a time; of one session
SAMPLING = {"temperature": 1.0, "logit_bias": {str(IM_END): -100}}  # every answer as long as it may be
SHORT, LONG = 1000, 1_000_000  # tokens: some are whole between two polls, some are killed before they are


def talk_until_killed(
    home: Path, store: SessionStore, session: Session, choose: random.Random, asked: int, kind: type[Chat]
) -> int:
    """One life of the chat; how many questions there were by its end. Checks what it left."""
    before = store.messages(session.id)
    said = len(before)
    answers = len(generated(home))
    moment = choose.choice(("starting", "talking", "answering", "answering"))
    store.set_sampling(session.id, {**SAMPLING, "max_tokens": LONG if moment == "answering" else SHORT})
    chat = kind(home, "--resume", session.id)
    try:
        until = time.monotonic() + (choose.uniform(0, 1) if moment == "starting" else PATIENCE_S)
        first = asked
        while time.monotonic() < until:
            now = store.messages(session.id)
            for old, new in zip(before, now, strict=False):
                assert new == old if old.finish_reason else new.content.startswith(old.content)
            answered = not now or (now[-1].role == "assistant" and now[-1].finish_reason is not None)
            if chat.shows("message, or / for commands") and (answered or asked == first):
                if asked == first and moment == "talking":
                    until = time.monotonic() + choose.uniform(0, 1.5)
                if asked == first or any(message.content == f"question {asked:05}" for message in now):
                    asked += 1
                    chat.type(f"question {asked:05}\r")
            if moment == "answering" and len(now) > said + 1:  # the question, and the first of its answer
                moment = "answered"
                until = time.monotonic() + choose.uniform(0, 0.2)
            before = now
            time.sleep(0.005)
            assert chat.process.poll() is None, chat.written
    finally:
        shown = [number for number in range(asked + 1) if chat.shows(f"❯ question {number:05}")]
        chat.kill()
    until_alone(home)
    store.recover(session.id)
    check(store, session, before, {f"question {number:05}" for number in shown})
    stored = [message.content for message in store.messages(session.id)[said:] if message.role == "assistant"]
    check_answers(stored, [pieces for pieces in generated(home)[answers:] if pieces])
    return asked


def check_answers(stored: list[str], pieces: list[list[str]]) -> None:
    """Each stored answer is the one the engine generated; the last life's is its beginning."""
    if len(stored) < len(pieces):
        stored = [*stored, ""]
    assert len(stored) == len(pieces)
    assert stored[:-1] == ["".join(whole) for whole in pieces[:-1]]
    assert not pieces or "".join(pieces[-1]).startswith(stored[-1])


def until_alone(home: Path) -> None:
    """Wait until the engine has left."""
    deadline = time.monotonic() + PATIENCE_S
    while engines(home):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check(store: SessionStore, session: Session, before: list[Message], shown: set[str]) -> None:
    """The database after a kill: `before` was in it, and the screen had shown the questions `shown`."""
    assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
    after = store.messages(session.id)
    for old, new in zip(before, after, strict=False):
        assert new == old if old.finish_reason else new.content.startswith(old.content)
    assert len(after) >= len(before)
    questions = [message.content for message in after if message.role == "user"]
    assert shown <= set(questions)
    assert len(questions) == len(set(questions))


def kill_chats(folder: Path, kills: int, seed: int = 0, kind: type[Chat] = Chat) -> tuple[int, int]:
    """Kill it so often, below this folder: how many questions there were, and how many answers were cut short."""
    model = write_chat_model(folder / "model", context=1_000_000)

    def lane(number: int) -> tuple[int, int]:
        choose = random.Random(seed * LANES + number)
        home = folder / f"home{number}"
        store = SessionStore(home / "data" / "sessions.db")
        asked = 0
        for life in range(kills // LANES):
            if life % LIVES == 0:
                session = store.create(model=str(model))
            asked = talk_until_killed(home, store, session, choose, asked, kind)
        assert store.db.rows("PRAGMA foreign_key_check") == []
        store.db.run("INSERT INTO message_index(message_index, rank) VALUES ('integrity-check', 1)")
        said = [message for entry in store.sessions() for message in store.messages(entry.session.id)]
        store.close()
        return asked, sum(message.role == "assistant" and message.finish_reason is None for message in said)

    with ThreadPoolExecutor(LANES) as pool:
        asked, cut_short = (sum(counts) for counts in zip(*pool.map(lane, range(LANES)), strict=True))
    return asked, cut_short


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what is left behind")
def test_a_killed_chat_loses_no_stored_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_engines(monkeypatch)
    asked, cut_short = kill_chats(tmp_path, KILLS)
    assert asked >= KILLS // 2
    assert cut_short >= KILLS // 4
