"""The store of conversations: a database with other rows or bytes than it was written with, and old journals."""

import json
import random
import shutil
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.app.chat.open_session import OpenSession
from headrace.app.sessions.old_journals import Answer
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import HeadraceError
from tests.damaged_sessions import changed_pages, damage_row, mutation, rows_of, use, write_sound
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_value, text


class Database:
    """Rows with other values, or pages with other bytes: what comes out are records or our own errors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "work"
        self._folder.mkdir()
        self._sound = write_sound(folder / "sound.db")
        self._content = self._sound.read_bytes()

    def make(self, chance: random.Random) -> list[tuple[str, str, int, Any]] | bytes:
        if chance.random() < 0.5:
            return [mutation(chance) for _ in range(chance.choice((1, 1, 2, 5)))]
        return changed_pages(chance, self._content)

    def run(self, given: list[tuple[str, str, int, Any]] | bytes) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        path = self._folder / "sessions.db"
        if isinstance(given, bytes):
            path.write_bytes(given)
            with closing(SessionStore(path)) as store:
                use(store)
            return
        shutil.copy(self._sound, path)
        for table, column, place, value in given:
            damage_row(path, table, column, place, value)
        stored = rows_of(path)
        with closing(SessionStore(path)) as store:
            use(store)
            assert rows_of(path) == stored
            with suppress(HeadraceError):
                for entry in store.sessions():
                    with suppress(HeadraceError):
                        OpenSession(store, entry.session)


class Journals:
    """What an earlier version's killed chat left, changed: folded, or left alone; the store stays sound."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sessions.db"
        with closing(SessionStore(self._path)) as store:
            session = store.create()
            question = store.add(session.id, None, "user", "How is the river?")
            said = store.add(session.id, question.id, "assistant", "It is", model="m")
            store.reopen(said)
        self._answer = Answer(session.id, said.id, question.id, "m", 5)
        self._journals = self._path.with_suffix(".journals")

    def make(self, chance: random.Random) -> list[bytes]:
        return [self._journal(chance) for _ in range(chance.choice((1, 1, 2)))]

    def _journal(self, chance: random.Random) -> bytes:
        head = mutated_value(chance, asdict(self._answer)) if chance.random() < 0.7 else asdict(self._answer)
        said = text(chance).encode("utf-8", "surrogatepass")
        whole = json_bytes(chance, head) + b"\n" + said + bytes(chance.choice((0, 100)))
        return mutated_bytes(chance, whole) if chance.random() < 0.4 else whole

    def run(self, given: list[bytes]) -> None:
        self._journals.mkdir(exist_ok=True)
        for number, content in enumerate(given):
            (self._journals / f"x-{number}-0123abcd.journal").write_bytes(content)
        try:
            with closing(SessionStore(self._path)) as store:
                for entry in store.sessions():
                    for message in store.messages(entry.session.id):
                        json.dumps(message.content).encode()
                        message.content.encode()
                assert [row[0] for row in store.db.rows("PRAGMA integrity_check")] == ["ok"]
                store.db.run("DELETE FROM pieces")
                store.db.run("DELETE FROM messages WHERE id > 2")
        finally:
            for path in self._journals.glob("*") if self._journals.is_dir() else ():
                path.unlink()
