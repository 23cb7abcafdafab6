"""Saved benchmark runs: an SQLite file in the data folder, one row per run."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from headrace.app.bench.compare.stored import checked
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import HeadraceError, UsageError

_VERSION = 1
_CREATE = """
create table if not exists run (
    id integer primary key,
    created text not null,
    device text not null,
    model text not null,
    document text not null
)
"""


class History:
    """The database of saved runs; the constructor opens or creates it. Methods raise HeadraceError on disk errors."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_dir() / "bench.sqlite"
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path)
            (version,) = self._database.execute("pragma user_version").fetchone()
            if version > _VERSION:
                raise HeadraceError(f"{self._path}: written by a newer headrace; update this one")
            with self._database:
                self._database.execute(_CREATE)
                self._database.execute(f"pragma user_version = {_VERSION}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, document: dict[str, Any]) -> int:
        """Save a run and return its number."""
        row = (document["created"], document["device"]["name"], document["model"]["name"], json.dumps(document))
        with self._errors(), self._database:
            cursor = self._database.execute(
                "insert into run (created, device, model, document) values (?, ?, ?, ?)", row
            )
        return int(cursor.lastrowid or 0)

    def get(self, number: int) -> dict[str, Any]:
        """Return the document of a run. Raises UsageError for an unknown number."""
        with self._errors():
            row = self._database.execute("select document from run where id = ?", (number,)).fetchone()
        if row is None:
            raise UsageError(f"no saved run {number}", "`headrace bench history` lists them")
        return _document(number, row[0])

    def delete(self, number: int) -> None:
        """Delete a run. Raises UsageError for an unknown number."""
        with self._errors(), self._database:
            if self._database.execute("delete from run where id = ?", (number,)).rowcount == 0:
                raise UsageError(f"no saved run {number}", "`headrace bench history` lists them")

    def documents(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return (number, document) of all runs, oldest first."""
        with self._errors():
            rows = self._database.execute("select id, document from run order by created, id").fetchall()
        for number, text in rows:
            yield number, _document(number, text)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn SQLite and disk errors into HeadraceError."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise HeadraceError(f"{self._path}: {error}") from None


def _document(number: int, text: str) -> dict[str, Any]:
    try:
        return checked(json.loads(text), f"saved run {number}")
    except ValueError:
        raise HeadraceError(
            f"saved run {number} is damaged", f"`headrace bench history --delete {number}` removes it"
        ) from None
