"""Progress without a terminal: a line per stage, nothing when quiet. On one: a bar, and the cursor afterwards."""

import sys
import threading
from collections.abc import Callable

import pytest
from rich.live import Live

from headrace.app.bench.show.live import live_view
from headrace.app.output.progress import drawn_progress


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


def _bar() -> None:
    with drawn_progress() as progress:
        progress("downloading", 1, 2)


def _table() -> None:
    with live_view():
        pass


@pytest.mark.parametrize("draw", [_bar, _table])
def test_the_cursor_comes_back_even_if_the_end_is_interrupted(
    draw: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    stop, lives = Live.stop, []

    def interrupted(live: Live) -> None:
        lives.append(live)
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw()
    shown = capsys.readouterr().err
    assert 0 <= shown.rfind("\x1b[?25l") < shown.rfind("\x1b[?25h")
    stop(lives[0])
