"""Flushing to disk: F_FULLFSYNC on macOS, fsync elsewhere."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runtime.config.sync import sync_file

FULL = 51  # F_FULLFSYNC of macOS


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
