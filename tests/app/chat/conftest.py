"""Fixtures of the chat tests: a store and a scripted engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.app.sessions.store import SessionStore
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()
