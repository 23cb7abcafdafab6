"""Atomic file replacement under failures."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.config.replace_file import replace_file


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
        "headrace.runtime.config.replace_file.sync_file",
        lambda descriptor: modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode)),
    )
    created: list[int] = []
    real = os.open

    def watched(path: Path, flags: int, mode: int = 0o777, **others: Any) -> int:
        created.append(mode)
        return real(path, flags, mode, **others)

    monkeypatch.setattr(os, "open", watched)
    replace_file(file, "new\n")
    assert modes == [0o600]
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

    monkeypatch.setattr("headrace.runtime.config.replace_file.sync_file", full)
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
