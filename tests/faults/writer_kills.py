"""Kills writing chats (`tests.faults.chat_writer`), four at a time on one database, and checks the store.

Run as `python -m tests.faults.writer_kills DATABASE SEED KILLS`. The writers are forks of this process, which has no
thread and no database open when it forks. What must be there is what they promised, in words that went through a pipe;
what may be there is told by the numbers of an answer's pieces, which only ever grow.
"""

import os
import random
import re
import signal
import sys
import time
import traceback
import zlib
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore
from tests.faults import chat_writer

AT_A_TIME = 4


class Writer:
    """A chat that writes until it is killed."""

    def __init__(self, database: Path, seed: int) -> None:
        self._listen, say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.dup2(say, 1)
                chat_writer.main(database, seed)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(say)
        self._said = b""

    def await_promises(self, count: int) -> None:
        """Wait for so many promises."""
        while self._said.count(b"\n") < count and (part := os.read(self._listen, 4096)):
            self._said += part

    def kill(self) -> list[str]:
        """Kill it; return its promises."""
        os.kill(self._pid, signal.SIGKILL)
        while part := os.read(self._listen, 1 << 16):
            self._said += part
        os.close(self._listen)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        assert code == -signal.SIGKILL, "a writer ended by itself"
        return [line for line in self._said.decode().splitlines(keepends=True) if line.endswith("\n")]


def keeps(store: SessionStore, promises: list[str]) -> None:
    """Check the last promise about every message."""
    last = {line.split()[1]: line.split()[2:] for line in promises}
    for number, (length, crc, state) in last.items():
        message = store.message(int(number))
        kept = message.content if state == "whole" else message.content[: int(length)]
        assert (len(kept), zlib.crc32(kept.encode())) == (int(length), int(crc)), f"message {number} lost some of it"
        if state == "whole" and message.role == "assistant":
            assert message.finish_reason is not None


def in_order(answer: str) -> bool:
    """Return whether an answer consists of generations from their first piece on, without repetitions."""
    numbers = [int(number) for number in re.findall(r"\d+", answer)]
    begins = [number % chat_writer.MOST == 0 for number in numbers]
    grows = all(
        after == before + 1 or (after > before and begin)
        for (before, after), begin in zip(pairwise(numbers), begins[1:], strict=True)
    )
    return grows and all(begins[:1])


def sound(store: SessionStore) -> int:
    """Check the whole store; return the number of answers."""
    assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
    assert store.db.rows("PRAGMA foreign_key_check") == []
    answers = 0
    for entry in store.sessions():
        store.recover(entry.session.id)
        assert store.branch(entry.session.id)
        for message in store.messages(entry.session.id):
            answers += message.role == "assistant"
            assert message.role == "user" or in_order(message.content), f"{message.id}: {message.content!r}"
    assert store.db.rows("SELECT * FROM pieces") == []
    store.db.run("INSERT INTO message_index(message_index, rank) VALUES ('integrity-check', 1)")
    assert search(store, "wheel")
    return answers


def kill_writers(database: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kill so many writers; return the numbers of promises and stored answers."""
    choose = random.Random(seed)
    writers: list[Writer] = []
    promises: list[str] = []
    begun = 0
    for _ in range(kills):
        while len(writers) < AT_A_TIME and begun < kills:
            writers.append(Writer(database, seed * kills + begun))
            begun += 1
        writer = writers.pop(choose.randrange(len(writers)))
        writer.await_promises(choose.choice((0, 1, choose.randrange(60))))  # 1: it has the database open
        time.sleep(choose.uniform(0, 0.02))
        made = [line for line in writer.kill() if line.startswith("message")]
        with closing(SessionStore(database)) as store:
            keeps(store, made)
        promises += made
    with closing(SessionStore(database)) as store:
        keeps(store, promises)
        return len(promises), sound(store)


if __name__ == "__main__":
    print(*kill_writers(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[2])))
