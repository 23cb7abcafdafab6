"""Runs of headrace in forks: done, failed by themselves, or killed, and told apart."""

from pathlib import Path

import pytest

from tests.fuzz.forked import run


def test_runs_are_done_killed_or_fail(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    assert run(["--version"], errors) is False
    assert run(["--version"], errors, 0.0) is True
    with pytest.raises(AssertionError, match="No such file"):
        run(["batch", str(tmp_path / "none.jsonl"), "-m", str(tmp_path)], errors)
