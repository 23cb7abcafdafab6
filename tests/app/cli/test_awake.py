"""Long commands keep a Mac awake, nothing else does anywhere."""

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.app.cli import awake


def test_a_mac_is_kept_awake_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(awake, "_processes", [])
    monkeypatch.setattr(sys, "platform", "linux")
    awake.keep_awake()
    assert not started
    monkeypatch.setattr(sys, "platform", "darwin")
    awake.keep_awake()
    assert started == [["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]]


def test_a_mac_without_caffeinate_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "Popen", missing)
    monkeypatch.setattr(sys, "platform", "darwin")
    awake.keep_awake()


@pytest.mark.parametrize(
    ("module", "command", "arguments"),
    [
        ("batch", "batch", ["in.jsonl"]),
        ("bench.command", "bench", []),
        ("models", "pull", []),
        ("serve", "serve", []),
    ],
)
def test_long_commands_keep_it_awake(
    module: str, command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        pass

    def ask() -> None:
        raise AskedError

    found = importlib.import_module(f"headrace.app.cli.{module}")
    monkeypatch.setattr(found, "keep_awake", ask)
    result = CliRunner().invoke(getattr(found, command), arguments)
    assert isinstance(result.exception, AskedError)
