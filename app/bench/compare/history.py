"""Saved benchmark runs: an SQLite file in the data folder, one row per run.

`bench --save` adds one; `bench history` and `bench compare` read them. A row is the whole JSON document, so a new
figure needs no new column.

Guards: tests/app/bench/test_views.py and tests/app/cli/test_bench.py.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from msgspec import Struct

from headrace.app.bench.compare.documents import checked
from headrace.app.bench.measure.records import RunDocument
from headrace.app.output.document import json_text
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import HeadraceError, UsageError

_VERSION = 1  # of the table; the documents in it have a version of their own, which `documents.checked` knows
_CREATE = """
create table if not exists run (
    id integer primary key,
    created text not null,
    device text not null,
    model text not null,
    document text not null
)
"""


class SavedRun(Struct, frozen=True):
    """A saved run. text: its document as saved, with the keys of the version that saved it."""

    number: int
    text: str
    document: RunDocument


class History:
    """The database of saved runs; the constructor opens or creates it. Methods raise HeadraceError on disk errors."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_dir() / "bench.sqlite"
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path)
            (version,) = self._database.execute("pragma user_version").fetchone()
            if version > _VERSION:  # 0: a new file
                raise HeadraceError(f"{self._path}: written by a newer headrace; update this one")
            with self._database:
                self._database.execute(_CREATE)
                self._database.execute(f"pragma user_version = {_VERSION}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, document: RunDocument) -> int:
        """Save a run and return its number."""
        row = (document.created, document.device.name, document.model.name, json_text(document, indent=None))
        with self._errors(), self._database:
            cursor = self._database.execute(
                "insert into run (created, device, model, document) values (?, ?, ?, ?)", row
            )
        return int(cursor.lastrowid or 0)

    def get(self, number: int) -> SavedRun:
        """Return a run. Raises UsageError for an unknown number."""
        with self._errors():
            row = self._database.execute("select document from run where id = ?", (number,)).fetchone()
        if row is None:
            raise UsageError(f"no saved run {number}", "`headrace bench history` lists them")
        return _saved(number, row[0])

    def delete(self, number: int) -> None:
        """Delete a run. Raises UsageError for an unknown number."""
        with self._errors(), self._database:
            if self._database.execute("delete from run where id = ?", (number,)).rowcount == 0:
                raise UsageError(f"no saved run {number}", "`headrace bench history` lists them")

    def runs(self) -> Iterator[SavedRun]:
        """Return all runs, oldest first."""
        with self._errors():
            rows = self._database.execute("select id, document from run order by created, id").fetchall()
        for number, text in rows:
            yield _saved(number, text)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn SQLite and disk errors into HeadraceError."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise HeadraceError(f"{self._path}: {error}") from None


def _saved(number: int, text: str) -> SavedRun:
    try:
        return SavedRun(number, text, checked(json.loads(text), f"saved run {number}"))
    except ValueError:
        raise HeadraceError(
            f"saved run {number} is damaged", f"`headrace bench history --delete {number}` removes it"
        ) from None
