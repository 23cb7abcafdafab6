"""The session store with changed rows or bytes."""

import random
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from headrace.app.chat.session_branch import SessionBranch
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import HeadraceError
from tests.support.damaged_sessions import changed_pages, damage_row, mutation, rows_of, use, write_sound


class Database:
    """Rows with other values, or pages with other bytes: records or HeadraceErrors come out."""

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
                        SessionBranch(store, entry.session)
