"""What tests of the chat's logic begin with: a store of their own, and an engine that says what it is told to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.app.sessions.store import SessionStore
from tests.app.scripted_engine import ScriptedEngine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()
