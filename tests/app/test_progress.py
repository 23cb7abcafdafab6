"""Progress without a terminal: a line per stage, nothing when quiet, and no rich."""

import sys
import threading

import pytest

from app.progress import drawn_progress


def test_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_progress() as progress:
        for done in range(100):
            progress("downloading", done, 100)
        progress("verifying", 0, None)
        progress("verifying", 1, None)
    captured = capsys.readouterr()
    assert captured.err == "downloading ...\nverifying ...\n"
    assert captured.out == ""


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_progress(quiet=True) as progress:
        progress("downloading", 1, 2)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_from_any_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    with drawn_progress() as progress:
        workers = [threading.Thread(target=progress, args=("downloading", done, 4)) for done in range(5)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        progress("verifying", 0, None)
    assert capsys.readouterr().out == ""
    assert "rich.progress" in sys.modules
