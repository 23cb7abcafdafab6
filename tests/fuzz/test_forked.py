"""Forked headrace runs: finished, failed or killed; and a forked chat."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fuzz.forked import ForkedChat, run
from tests.support.patience import PATIENCE_S


def test_a_forked_run_ends_is_killed_or_fails(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    requests = tmp_path / "requests"
    os.mkfifo(requests)  # which nobody writes to: a run that never ends
    assert run(["--version"], errors) is False
    assert run(["batch", str(requests), "-m", str(tmp_path)], errors, 0.2) is True
    with pytest.raises(AssertionError, match="No such file"):
        run(["batch", str(tmp_path / "none.jsonl"), "-m", str(tmp_path)], errors)


def test_a_chat_draws_its_screen_and_is_killed(tmp_path: Path) -> None:
    chat = ForkedChat(tmp_path, "-m", str(tmp_path / "none"))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not chat.shows("message, or / for commands"):
            assert chat.process.poll() is None, chat.written
            assert time.monotonic() < deadline, chat.written
            time.sleep(0.05)
    finally:
        chat.kill()
    assert chat.process.poll() == -signal.SIGKILL
