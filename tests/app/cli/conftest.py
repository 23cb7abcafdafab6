"""Benchmarks with a real peer, where a machine has one."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TEST_HOME


@pytest.fixture
def with_peer(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return `arguments`, a module's own, with the real peer and the GGUF that other tests have fetched.

    Takes the variable that names a Python with the peer; a test is skipped without it.
    """

    def changed(variable: str) -> list[str]:
        python = os.environ.get(variable)
        gguf = next(TEST_HOME.glob("*.gguf"), None)
        if not python or gguf is None:
            pytest.skip(f"{variable} names no Python with the peer")
        monkeypatch.delenv("PYTHONPATH")
        swapped = {sys.executable: python, str(Path(arguments[1]).parent / "some.gguf"): str(gguf)}
        return [*(swapped.get(word, word) for word in arguments), "-p", "0"]

    return changed
