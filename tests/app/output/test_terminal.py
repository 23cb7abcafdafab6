"""Styles on a real (pseudo) terminal: there by default, none at all under NO_COLOR or TERM=dumb."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import HEADRACE, ForkedProcess
from tests.support.tiny_chat import write_chat_model


def on_a_terminal(arguments: list[str], home: Path, **environment: str) -> str:
    """Return the command's output on a terminal that is all three streams."""
    ours, theirs = pty.openpty()
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    with ForkedProcess(
        [*HEADRACE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", "HEADRACE_HOME": str(home), **environment},
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                written += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["run", "models", "fit"])
def test_no_color_disables_styles(command: str, home: Path) -> None:
    arguments = {"run": ["run", "hi", "-n", "4", "-m"], "models": ["models", "list"], "fit": ["fit"]}[command]
    if command == "run":
        arguments.append(str(write_chat_model(home / "chat")))
    if command == "fit":
        arguments += ["--chip", "M4", "--memory", "16"]
    assert "\x1b[" in on_a_terminal(arguments, home)
    assert "\x1b" not in on_a_terminal(arguments, home, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(arguments, home, TERM="dumb")
