"""Progress on stderr: a line per stage in logs, a bar on terminals, nothing when quiet."""

import sys
import threading

import pytest
from rich.live import Live

from headrace.app.bench.show.live import live_view
from headrace.app.output import progress as progress_module
from headrace.app.output.progress import NumberedStages, RedrawnLine, drawn_progress, stage_progress


def test_in_a_pipe_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_progress() as progress:
        for done in range(100):
            progress("downloading", done, 100)
        progress("verifying", 0, None)
        progress("verifying", 1, None)
    captured = capsys.readouterr()
    assert captured.err == "downloading ...\nverifying ...\n"
    assert captured.out == ""


def test_a_progress_log_can_leave_out_short_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    with drawn_progress(log_after_s=10.0) as progress:
        for second in range(35):
            clock[0] = float(second)
            progress("loading weights", second, 40)
        progress("loading the tokenizer", 0, None)
        clock[0] += 9
        progress("loading the tokenizer", 0, None)
    assert capsys.readouterr().err.splitlines() == [f"loading weights {share} % ..." for share in (25, 50, 75)]


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_progress(quiet=True) as progress:
        progress("downloading", 1, 2)
    assert capsys.readouterr().err == ""


def test_any_thread_may_advance_the_bar_on_a_terminal(
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
        progress("verifying\x1b[2J", 0, None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Downloading ╌" in captured.err
    assert "\x1b" not in captured.err
    assert captured.err.endswith(" \r")


@pytest.mark.parametrize(("columns", "bar"), [("80", 17), ("120", 24), ("40", 8)])
def test_the_bar_leaves_room_for_the_time_left(
    columns: str, bar: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", columns)
    clock = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    progress = stage_progress()
    for second in range(3):
        clock[0] = float(second)
        progress("loading weights", second << 30, 40 << 30)
    line = capsys.readouterr().err.split("\r")[-1].rstrip()
    assert line.count("━") + line.count("╌") == bar
    assert line.endswith("2.00 GiB of 40.0 GiB · 1.00 GiB/s · 38 s left") is (columns != "40")


def test_wide_characters_are_cut_and_overwritten_by_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "10")
    line = RedrawnLine(quiet=False)
    line.draw("模型" * 9)
    assert capsys.readouterr().err == "\r模型模型 "  # 9 cells: a tenth column would wrap
    line.draw("abc")
    assert capsys.readouterr().err == "\rabc" + 6 * " "
    line.clear()
    assert capsys.readouterr().err == "\r   \r"


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_stage_is_shown_again_after_its_line_was_cleared(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    progress = stage_progress()
    for _load in range(2):
        for done in range(3):
            progress("loading weights", done, None)
        progress.clear()
        progress.clear()
    shown = capsys.readouterr().err
    assert shown.lower().count("loading weights") == 2
    assert shown.endswith(" \r" if on_terminal else "...\n")


def test_numbered_stages_begin_and_tick(capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_progress() as progress:
        stages = NumberedStages("check", progress)
        stages.begin(2, 3, "alone")
        stages.tick()
    assert capsys.readouterr().err == "check 2 of 3: alone ...\n"


def test_the_cursor_comes_back_even_if_the_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    stop = Live.stop
    lives = []

    def interrupted(live: Live) -> None:
        lives.append(live)
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt), live_view():
        pass
    shown = capsys.readouterr().err
    assert 0 <= shown.rfind("\x1b[?25l") < shown.rfind("\x1b[?25h")
    stop(lives[0])
