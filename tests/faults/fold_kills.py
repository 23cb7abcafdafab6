"""Kills writers of answers while they append and fold, and compares the store with the pieces they reported.

Run as `python -m tests.faults.fold_kills DATABASE SEED KILLS`: prints how many kills it made, in how many of them a
fold was under way, and what was lost or doubled. Every piece of an answer has a number of its own, and goes through a
pipe before and after it is stored, so that an answer stored twice cannot look like one that repeats itself.
"""

import os
import random
import select
import signal
import sys
from contextlib import closing
from pathlib import Path

from headrace.app.sessions.store import SessionStore

Said = dict[int, tuple[int, int]]  # message id: pieces that were promised, pieces that were begun


def write(path: Path, session: str, seed: int, say: int) -> None:
    """Write, finish, continue and recover answers until the process is killed."""
    choose = random.Random(seed)
    store = SessionStore(path)
    while True:
        asked = store.add(session, None, "user", "?")
        message = store.begin_answer(session, asked.id, "m")
        number = 0
        for _ in range(choose.randrange(1, 4)):
            for _ in range(choose.randrange(1, 12)):
                number += 1
                os.write(say, f"begun {message.id} {number}\n".encode())
                store.grow(message.id, f"{number} ", durable=choose.random() < 0.2)
                os.write(say, f"kept {message.id} {number}\n".encode())
            os.write(say, f"folding {message.id} {number}\n".encode())
            if choose.random() < 0.5:
                store.recover(session)
            else:
                store.finish(message.id, "stop")
                os.write(say, f"folded {message.id} {number}\n".encode())
                store.reopen(store.message(message.id))
            os.write(say, f"folded {message.id} {number}\n".encode())


def kill_one(path: Path, session: str, seed: int) -> tuple[Said, bool]:
    """Kill a writer; return its reports, and whether it was folding."""
    listen, say = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            write(path, session, seed, say)
        finally:
            os._exit(1)
    os.close(say)
    said = b""
    seconds = random.Random(seed).uniform(0.0, 0.03)
    while not select.select([listen], [], [], 10)[0]:
        pass
    while select.select([listen], [], [], seconds)[0] and len(said) < random.Random(seed).randrange(1, 3000):
        said += os.read(listen, 64)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while part := os.read(listen, 65536):
        said += part
    os.close(listen)
    lines = [line.split() for line in said.decode().splitlines(keepends=True) if line.endswith("\n")]
    pieces: Said = {}
    for what, message, number in lines:
        kept, begun = pieces.get(int(message), (0, 0))
        pieces[int(message)] = (int(number) if what == "kept" else kept, max(begun, int(number)))
    return pieces, bool(lines) and lines[-1][0] == "folding"


def wrong_after(path: Path, session: str, pieces: Said) -> list[str]:
    """Return the answers with missing, doubled or misplaced pieces."""
    wrong = []
    with closing(SessionStore(path)) as store:
        for look in ("before folding", "after folding"):
            for number, (kept, begun) in pieces.items():
                content = store.message(number).content
                if content not in ("".join(f"{n} " for n in range(1, last + 1)) for last in range(kept, begun + 1)):
                    wrong.append(f"{look}: message {number} with {kept} to {begun} pieces is {content!r}")
            store.recover(session)
    return wrong


def main(path: Path, seed: int, kills: int) -> None:
    with closing(SessionStore(path)) as store:
        session = store.create().id
    folding = 0
    wrong = []
    for number in range(kills):
        pieces, was_folding = kill_one(path, session, seed + number)
        folding += was_folding
        wrong += wrong_after(path, session, pieces)
    print(kills, "kills,", folding, "while folding,", len(wrong), "answers wrong", *wrong[:5])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
