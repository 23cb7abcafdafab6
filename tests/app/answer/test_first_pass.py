"""Words for a slow first pass, and where they are written."""

import os
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from msgspec.structs import replace

from headrace.app.answer.first_pass import FirstPassLine, FirstPassLog, first_pass_text
from headrace.app.cli.commands import cli
from headrace.app.output.progress import RedrawnLine
from headrace.runtime.engine import engine, first_pass
from headrace.runtime.machine.hardware import machine
from tests.support.commands import SLOW_FIRST_PASS, headrace
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import write_chat_model

COMPILES = "MLX compiles its kernels, once per machine and MLX version"
needs_forks = pytest.mark.skipif(sys.platform != "linux", reason="a process that is not forked has no slow first pass")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    monkeypatch.setattr(first_pass, "machine", lambda: replace(here, backend="cuda"))


def test_a_first_pass_over_a_minute_is_shown_in_minutes() -> None:
    assert first_pass_text(62.0) == f"first pass, 1 min 02 s: {COMPILES}"


def test_a_log_has_a_line_every_ten_seconds() -> None:
    lines: list[str] = []
    log = FirstPassLog(lines.append)
    for half_seconds in range(4, 50):
        log.add(half_seconds / 2)
    assert [line.partition(":")[0] for line in lines] == ["first pass, 2 s", "first pass, 10 s", "first pass, 20 s"]


def test_the_first_pass_is_printed_as_lines_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    report = FirstPassLine(RedrawnLine(quiet=False), quiet=False)
    report(2.0)
    report(2.5)
    assert capsys.readouterr() == ("", f"first pass, 2 s: {COMPILES} ...\n")


def test_quiet_prints_no_line_about_the_first_pass(capsys: pytest.CaptureFixture[str]) -> None:
    FirstPassLine(RedrawnLine(quiet=True), quiet=True)(2.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("more", [(), ("--json",), ("--samples", "2", "-t", "1"), ("-q",)])
def test_run_counts_the_seconds_on_a_terminal(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pseudo-terminal, and a first pass that lasts until the line is drawn."""
    model = write_chat_model(tmp_path / "chat")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(first_pass, "SLOW_S", 0.02)
    ours, theirs = os.openpty()
    start = engine.start
    drawn: list[bytes] = []

    def slow_start(*arguments: Any) -> Any:
        while not drawn and "-q" not in more:
            drawn.append(os.read(ours, 1000))
        return start(*arguments)

    monkeypatch.setattr(engine, "start", slow_start)
    with os.fdopen(theirs, "w") as terminal, Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        monkeypatch.setattr(sys, "stderr", terminal)
        arguments = ["run", "hi", "-m", str(model), "-n", "4", *more]
        assert cli.main(arguments, standalone_mode=False) == 0
        terminal.write("end")
        terminal.flush()
        while not drawn or b"end" not in drawn[-1]:
            drawn.append(os.read(ours, 1000))
    os.close(ours)
    output = b"".join(drawn).decode()
    assert (f"\rfirst pass, 0 s: {COMPILES}" in output) is ("-q" not in more)
    assert "first pass" not in capsys.readouterr().out


@needs_forks
@pytest.mark.parametrize("more", [(), ("-q",)])
def test_serve_logs_the_seconds(more: tuple[str, ...], tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chat")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with ServerProcess(tmp_path / "home", "-m", str(model), *more, **{SLOW_FIRST_PASS: "1"}) as server:
        answer = httpx.post(f"{server.root}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200
        lines = [line for line in server.errors.splitlines() if "first pass" in line]
    assert lines == [f"headrace: first pass, 0 s: {COMPILES}"] * (not more)


@needs_forks
def test_bench_logs_the_seconds(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "chat")
    arguments = ("bench", "-m", model, "-p", "0", "-n", "2", "-r", "1")
    done = headrace(*arguments, home=tmp_path / "home", code=0, **{SLOW_FIRST_PASS: "1"})
    lines = [line for line in done.stderr.splitlines() if "first pass" in line]
    assert lines == [f"warm-up: tg2 · headrace chat: first pass, 0 s: {COMPILES} ..."]
