"""Fixtures of the engine process tests: a home folder and a tiny chat model."""

from pathlib import Path

import pytest

from tests.support.tiny_chat import write_chat_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat", context=1_000_000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
