"""Files that are not regular, atomic replacement under failures, flushing to the disk, damaged cache files."""

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.app.config.settings import load_settings
from headrace.models.registry.store import Store
from headrace.runtime.config.files import (
    open_regular,
    read_cache,
    read_regular,
    replace_file,
    sync_file,
    touch_cache,
    write_cache,
)
from headrace.runtime.config.paths import shown_name
from headrace.runtime.errors import CheckpointError, UsageError
from headrace.runtime.kv.disk import DiskStore

FULL = 51  # F_FULLFSYNC of macOS


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


def test_a_refused_folder_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors: list[int] = []
    open_file = os.open

    def open_and_note(*arguments: Any) -> int:
        descriptors.append(open_file(*arguments))
        return descriptors[-1]

    monkeypatch.setattr(os, "open", open_and_note)
    with pytest.raises(ValueError, match="not a regular file"):
        open_regular(tmp_path, 1 << 20)
    [descriptor] = descriptors
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(3 << 20)
    assert len(read_regular(file, 3 << 20)) == 3 << 20
    with pytest.raises(ValueError, match="it is larger than 2 MiB"):
        read_regular(file, 2 << 20)


def test_a_shown_file_name_is_one_safe_line() -> None:
    assert shown_name(Path("/models/a\nb\x1b[31m ü 漢")) == "a\ufffdb\ufffd[31m ü 漢"


def test_new_text_replaces_old_text(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "settings.toml"
    for text in ("river = 'Länge'\n", ""):
        replace_file(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(file.parent.iterdir()) == [file]


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "settings.toml").symlink_to(tmp_path / "dotfiles" / "settings.toml")
    replace_file(tmp_path / "settings.toml", "a = 1\n")
    assert (tmp_path / "settings.toml").is_symlink()
    assert [path.read_text() for path in (tmp_path / "dotfiles").iterdir()] == ["a = 1\n"]


def test_a_link_into_a_missing_folder_creates_none(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").symlink_to(tmp_path / "dotfiles" / "settings.toml")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "settings.toml", "a = 1\n")
    assert not (tmp_path / "dotfiles").exists()
    assert (tmp_path / "settings.toml").is_symlink()


def test_permissions_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("old\n")
    for mode in (0o600, 0o644):
        file.chmod(mode)
        replace_file(file, "new\n")
        assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_private_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("old\n")
    file.chmod(0o600)
    modes = []
    monkeypatch.setattr(
        "headrace.runtime.config.files.sync_file",
        lambda descriptor: modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode)),
    )
    created: list[int] = []
    real = os.open

    def watched(path: Path, flags: int, mode: int = 0o777, **others: Any) -> int:
        created.append(mode)
        return real(path, flags, mode, **others)

    monkeypatch.setattr(os, "open", watched)
    replace_file(file, "new\n")
    assert modes[0] == 0o600  # then the folder is flushed
    assert created[0] == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_a_planted_link_is_not_followed(tmp_path: Path, there: bool) -> None:
    file = tmp_path / "settings.toml"
    other = tmp_path / "other"
    if there:
        other.write_text("mine\n")
    (tmp_path / f".settings.toml.headrace-{os.getpid()}").symlink_to(other)
    replace_file(file, "new\n")
    assert not file.is_symlink()
    assert file.read_text() == "new\n"
    assert other.exists() == there
    assert not there or other.read_text() == "mine\n"


def test_a_failed_write_leaves_the_old_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    replace_file(file, "old\n")

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, 2)
        raise OSError("the disk is full")

    monkeypatch.setattr("headrace.runtime.config.files.sync_file", full)
    with pytest.raises(OSError, match="full"):
        replace_file(file, "new\n")
    assert file.read_bytes() == b"old\n"
    assert list(tmp_path.iterdir()) == [file]


def test_only_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    file = tmp_path / "settings.toml"
    beside = ".settings.toml.headrace-"
    left = tmp_path / f"{beside}{gone.pid}"
    new = tmp_path / f"{beside}{2**22 + 5}"
    running = tmp_path / f"{beside}{os.getppid()}"
    names = ("settings.toml.", ".settings.toml.", f"{beside}0", f"{beside}b", ".x.toml.headrace-")  # the user's
    others = [running, *(tmp_path / f"{name}{gone.pid}" for name in names)]
    for path in (left, *others):
        path.write_text("half")
        os.utime(path, (1e9, 1e9))
    new.write_text("half")  # so young that it may be another machine's that has this folder, too
    replace_file(file, "whole")
    assert set(tmp_path.iterdir()) == {file, new, *others}


@pytest.fixture
def flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], int] | None], list[str]]:
    """Flush a file where fcntl's F_FULLFSYNC is this function (None: there is none); tells which calls were made."""

    def flush(full: Callable[[int, int], int] | None) -> list[str]:
        calls: list[str] = []

        def control(descriptor: int, command: int) -> int:
            assert full is not None
            calls.append("F_FULLFSYNC")
            return full(descriptor, command)

        monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
        monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
        if full is not None:
            monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", control)
        with (tmp_path / "file").open("wb") as file:
            sync_file(file.fileno())
        return calls

    return flush


def unsupported(_descriptor: int, _command: int) -> int:
    raise OSError(45, "Operation not supported")


def test_files_are_synced_by_fsync_outside_macos(flushed: Callable[..., list[str]]) -> None:
    assert flushed(None) == ["fsync"]


def test_files_are_synced_by_fullfsync_on_macos(flushed: Callable[..., list[str]]) -> None:
    assert flushed(lambda *_: 0) == ["F_FULLFSYNC"]


def test_files_are_synced_by_fsync_where_fullfsync_is_unsupported(flushed: Callable[..., list[str]]) -> None:
    assert flushed(unsupported) == ["F_FULLFSYNC", "fsync"]


def test_written_content_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "cache.json"
    assert read_cache(file) == {}
    for content in ({"a": [1, 2.5, None]}, {}):
        write_cache(file, content)
        assert read_cache(file) == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000])
def test_broken_cache_files_read_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache.json").write_bytes(content)
    assert read_cache(tmp_path / "cache.json") == {}


def test_the_least_recently_used_cache_files_are_deleted(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.json" for name in "abcd"]
    for age, file in enumerate(files):
        write_cache(file, {})
        os.utime(file, (age, age))
    (tmp_path / "other").touch()
    touch_cache(files[1], 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "c.json", "d.json", "other"]
    touch_cache(tmp_path / "new.json", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "d.json", "other"]
    touch_cache(tmp_path / "missing" / "new.json", 3)


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_cache(tmp_path / "file" / "cache.json", {"a": 1})
    (tmp_path / "cache.json").mkdir()
    write_cache(tmp_path / "cache.json", {"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.json", "file"]
