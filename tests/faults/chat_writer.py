"""An endless chat for tests that kill it: a Conversation with a scripted engine, at full speed.

Run as `python -m tests.faults.chat_writer DATABASE SEED`. Every line on standard output is a promise about what is
in the database now: `message ID LENGTH CRC whole` or `message ID LENGTH CRC growing`. Every piece that the engine
says has a number that none had before, the first of a generation a multiple of MOST.
"""

import itertools
import random
import sys
import zlib
from pathlib import Path

from headrace.app.chat.candidates import Candidates
from headrace.app.chat.conversation import Conversation
from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from tests.support.scripted_engine import Script, ScriptedEngine

MOST = 40  # pieces of a generation
WORDS = ("water ", "wheel ", "über ", "字", "🙂 ", "`code`\n", "<think>\n", "mill ")


def promise(message: Message, *, growing: bool = False) -> None:
    state = "growing" if growing else "whole"
    print("message", message.id, len(message.content), zlib.crc32(message.content.encode()), state, flush=True)


def again(chat: Conversation, choose: random.Random) -> None:
    """Generate candidates, and perhaps take one."""
    several = Candidates(chat, choose.randrange(2, 5))
    while several.phase != "idle":
        several.poll()
        for side in several.answers:
            if side.answer is not None and side.answer.content and choose.random() < 0.2:
                promise(side.answer, growing=True)
        if choose.random() < 0.02:
            several.stop()
    said = [side for side in several.answers if side.answer is not None]
    several.take(choose.choice([None, *said]))
    for side in said:
        promise(side.messages[-1])


def main(database: Path, seed: int) -> None:
    choose = random.Random(seed)
    store = SessionStore(database)
    engine = ScriptedEngine()
    chat = Conversation(engine, store)
    chat.load_model()
    chat.poll()
    print("ready", flush=True)
    for generation in itertools.count(1):
        count = choose.randrange(1, MOST)
        pieces = [f"{generation * MOST + piece} {choose.choice(WORDS)}" for piece in range(count)]
        engine.script(Script(pieces=pieces, prompt_tokens=choose.randrange(2, 99)))
        engine.pieces_per_poll = choose.randrange(1, 9)
        answers = [message for message in chat.messages if message.role == "assistant"]
        action = choose.choice(("send", "send", "send", "regenerate", "edit", "continue", "new", "again"))
        if action == "regenerate" and answers:
            chat.regenerate(choose.choice(answers).id)
        elif action == "edit" and chat.messages:
            chat.edit(chat.messages[0].id, choose.choice(WORDS))
        elif action == "continue" and answers:
            promise(chat.messages[-1], growing=True)
            chat.continue_answer()
        elif action == "again" and answers:
            again(chat, choose)
            continue
        elif action == "new" and len(chat.messages) > 10:
            chat.close()
            chat = Conversation(engine, store)
            continue
        else:
            promise(chat.send(choose.choice(WORDS) * choose.randrange(1, 50)))
        while chat.phase != "idle":
            chat.poll()
            if chat.phase == "answering" and chat.messages[-1].content and choose.random() < 0.3:
                promise(chat.messages[-1], growing=True)
            if choose.random() < 0.01:
                chat.stop()
        promise(chat.messages[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
