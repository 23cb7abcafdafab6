"""Runs of headrace in forks: done, failed by themselves, or killed, and told apart."""

import os
from pathlib import Path

import pytest

from tests.fuzz.forked import run


def test_runs_are_done_killed_or_fail(tmp_path: Path) -> None:
    errors, requests = tmp_path / "errors", tmp_path / "requests"
    os.mkfifo(requests)  # which nobody writes to: a run that never ends
    assert run(["--version"], errors) is False
    assert run(["batch", str(requests), "-m", str(tmp_path)], errors, 0.2) is True
    with pytest.raises(AssertionError, match="No such file"):
        run(["batch", str(tmp_path / "none.jsonl"), "-m", str(tmp_path)], errors)
