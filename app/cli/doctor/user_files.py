"""State of the user's files for `headrace doctor`: settings, conversations, installed models.

Each function returns one line and any problems; none raises, writes or takes long.
"""

import sqlite3
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from headrace.app.cli.doctor.finding import Finding
from headrace.runtime.errors import CheckpointError, HeadraceError

if TYPE_CHECKING:
    from headrace.models.registry.store import Store


@dataclass(frozen=True)
class State:
    """A line about some files, and problems with them."""

    text: str
    findings: list[Finding] = field(default_factory=list)


def settings_state() -> State:
    """Check the settings file and count its changes from the defaults."""
    from headrace.app.config.settings import Settings, load_settings, settings_path

    path = settings_path()
    try:
        settings = load_settings(path)
    except HeadraceError as error:
        return State("invalid", [Finding("broken", str(error), error.hint or f"correct or delete {path}")])
    if not path.exists():
        return State("no file: defaults apply")
    usual = Settings()
    changed = sum(
        getattr(getattr(settings, section.name), one.name) != getattr(getattr(usual, section.name), one.name)
        for section in fields(settings)
        for one in fields(getattr(settings, section.name))
    )
    return State(f"{changed} changed from the defaults")


def sessions_state() -> State:
    """Check that the conversations are readable and their file is intact."""
    from headrace.app.sessions.database import Database
    from headrace.app.sessions.store import database_path

    path = database_path()
    if not path.exists():
        return State("none yet")
    try:
        database = Database(path)
        try:
            report = [str(row[0]) for row in database.rows("PRAGMA quick_check")]
            (count,) = database.rows("SELECT count(*) FROM sessions")[0]
        finally:
            database.close()
    except (HeadraceError, sqlite3.Error) as error:
        hint = getattr(error, "hint", None) or f"move {path} away to start with an empty one"
        return State("unreadable", [Finding("broken", str(error), hint)])
    if report != ["ok"]:
        what = f"the conversations in {path} are damaged: {report[0]}"
        hint = "`headrace sessions doctor --export FILE` saves everything readable"
        return State("damaged", [Finding("broken", what, hint)])
    return State(f"{count} stored")


def models_state() -> State:
    """Check every installed model's headers and file sizes."""
    from headrace.models.registry.store import Store

    store = Store()
    found = []
    unrecorded = 0
    for name in store.names():
        try:
            unrecorded += not _check_model(store, name)
        except HeadraceError as error:
            found.append(Finding("broken", str(error), error.hint or "pull it again"))
    if not store.names():
        return State("none yet")
    doubt = f", {unrecorded} without checksums" if unrecorded else ""
    return State(f"{len(store.names())} installed{doubt}; `headrace models verify` checks their contents", found)


def _check_model(store: "Store", name: str) -> bool:
    """Return whether the model has checksums. Raises CheckpointError with the problem and a hint."""
    from headrace.models.checkpoint.validation import check_sound, damaged
    from headrace.models.registry.checksums import recorded_files, size_problems

    model = store.get(name)
    if model is None:
        return True
    files = recorded_files(model.origin)
    try:
        check_sound(model.path)
        if problems := size_problems(model.path, files or {}):
            raise CheckpointError("; ".join(problems))
    except CheckpointError as error:
        raise damaged(name, error) from error
    return files is not None
