"""Files that others may have put in place of ours neither block nor never end."""

import os
from pathlib import Path

import pytest

from headrace.app.config.settings import load_settings
from headrace.models.registry.store import Store
from headrace.runtime.config.cache_file import read_cache
from headrace.runtime.config.paths import shown_name
from headrace.runtime.config.regular_file import read_regular
from headrace.runtime.errors import CheckpointError, UsageError
from headrace.runtime.kv.disk import DiskStore


def pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir(parents=True)


@pytest.mark.parametrize("make", [pipe, endless, folder])
def test_only_regular_files_are_read(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "settings.toml")
    with pytest.raises(UsageError, match=r"settings\.toml"):
        load_settings(tmp_path / "settings.toml")

    make(tmp_path / "cache.json")
    assert read_cache(tmp_path / "cache.json") == {}

    make(tmp_path / "models" / "tiny" / "headrace.json")
    with pytest.raises(CheckpointError, match="tiny"):
        Store(tmp_path / "models").get("tiny")

    store = DiskStore(tmp_path / "chats", 1 << 20)
    make(store._path(b"place"))
    assert not store.has(b"place", b"key")
    assert store.get(b"place") is None


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(3 << 20)
    assert len(read_regular(file, 3 << 20)) == 3 << 20
    with pytest.raises(ValueError, match="it is larger than 2 MiB"):
        read_regular(file, 2 << 20)


def test_a_name_is_one_line() -> None:
    assert shown_name(Path("/models/a\nb\x1b[31m ü 漢")) == "a\ufffdb\ufffd[31m ü 漢"
