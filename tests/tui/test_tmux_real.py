"""The whole program in a real terminal (tmux) with the real model: a session from start to quit, and how it ends.

Skipped where tmux is not installed. Needs no network once the default model is there. tests/faults/test_kills.py kills
the engine of an answer, and tests/tui/test_chat.py starts it again by F8.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.app.sessions.records import Draft
from headrace.app.sessions.store import SessionStore
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

_END_TOKENS = (0, 2)  # of the default model: <|endoftext|>, <|im_end|>
ROOT = Path(__file__).resolve().parents[2]


class Tmux:
    """A tmux server of its own with one window."""

    def __init__(self, home: Path, model: Path, size: tuple[int, int] = (120, 40)) -> None:
        self.home = home
        self._model = model
        self._size = size
        self._socket = str(home / "tmux.sock")
        self._env = {
            **{name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")},
            "HEADRACE_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-u", *command], env=self._env, capture_output=True, text=True, check=False
        )
        return done.stdout

    def start(self, *arguments: str) -> None:
        """A shell that starts the program and says how it left."""
        program = " ".join([sys.executable, "-m", "headrace", "chat", "-m", str(self._model), *arguments])
        width, height = (str(cells) for cells in self._size)
        shell = f"cd {self.home}; {program}; echo left with $?; exec sh"
        self.run("new-session", "-d", "-x", width, "-y", height, shell)

    def type(self, text: str) -> None:
        self.run("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def ask(self, text: str) -> None:
        self.type(text)
        self.press("Enter")

    @property
    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def until(self, holds: Callable[[str], object]) -> str:
        """The screen once something holds on it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            screen = self.screen
            if holds(screen):
                return screen
            time.sleep(0.1)
        raise AssertionError(f"never came up:\n{self.screen}")

    def sees(self, *texts: str) -> str:
        return self.until(lambda screen: all(text in screen for text in texts))

    def engines(self) -> list[int]:
        return engines(self.home)


@pytest.fixture
def tmux(tmp_path: Path, default_model: Path) -> Iterator[Tmux]:
    config = tmp_path / "config"
    config.mkdir()
    (config / "settings.toml").write_text("[sampling]\ntemperature = 0.0\nmax_tokens = 3000\n")
    terminal = Tmux(tmp_path, default_model)
    yield terminal
    terminal.run("kill-server")


def test_a_session_from_start_to_quit(tmux: Tmux) -> None:
    # No answer ends before it is stopped: the tokens that end one are never chosen.
    store = SessionStore(tmux.home / "data" / "sessions.db")
    bias = {str(token): -100 for token in _END_TOKENS}
    session = store.create(model=str(tmux._model), sampling={"temperature": 0, "logit_bias": bias})
    store.set_draft(session.id, Draft("What is the capital of France?"))  # an empty session is not resumed
    store.close()
    tmux.start("--resume", session.id)
    tmux.sees("headrace", "loaded in", "capital of France")

    tmux.press("Enter")
    _stop(tmux)
    tmux.sees("first token", "K/V cache", "model weights")

    tmux.ask("Write a very long story about a mill.")
    tmux.sees("answering", "◌")
    _stop(tmux)

    tmux.press("C-b")  # another answer in its place
    _stop(tmux)
    tmux.sees("‹2/2›")
    tmux.ask("/branch")
    tmux.sees("‹1/2›")

    tmux.press("F2")
    tmux.sees("step latency", "a step's time", "Freeze")
    tmux.press("F2")
    tmux.sees("message, or / for commands")

    tmux.ask("/export talk.json")
    tmux.until(lambda _: _document(tmux.home / "talk.json"))  # the toast that says so may be gone again
    document = _document(tmux.home / "talk.json")
    assert "Paris" in document["messages"][1]["content"]
    identity = document["session"]["id"]

    tmux.ask("/search capital")
    tmux.sees("«capital»")
    tmux.press("Escape")
    tmux.until(lambda screen: "«capital»" not in screen)  # else the next key would be Alt and that key
    tmux.ask("/quit")
    tmux.sees(f"saved: headrace chat --resume {identity}", "left with 0")
    tmux.until(lambda _: not tmux.engines())
    assert "headrace  " not in tmux.screen  # the screen is as it was before

    tmux.type(f"{sys.executable} -m headrace chat --resume {identity[:5]}")
    tmux.press("Enter")
    tmux.sees("■ stopped", "‹1/2›")  # the question may have scrolled out: answers come fast
    tmux.press("C-q")


def _stop(tmux: Tmux) -> None:
    """Stop an answer that does not end by itself, once it has words; what is typed next is not taken for Alt."""
    tmux.until(_words)
    tmux.press("Escape")
    tmux.until(lambda screen: "answering: Esc stops" not in screen and "■ stopped" in screen)


def _document(path: Path) -> Any:
    """Return the contents of a JSON file, None while it is missing or not whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _words(screen: str) -> bool:
    """Return True while an answer is being written and has some words."""
    return any("▍" in line and len(line.split()) > 1 for line in _chat(screen))


def _chat(screen: str) -> list[str]:
    """The lines of the chat, without the decode panel."""
    return [line[:74].rstrip() for line in screen.splitlines()]


def test_suspend_resize_and_a_closed_terminal(tmux: Tmux) -> None:
    tmux.run("new-session", "-d", "-x", "100", "-y", "30", "sh")
    tmux.type(f"cd {tmux.home}; {sys.executable} -m headrace chat -m {tmux._model}")
    tmux.press("Enter")
    tmux.sees("loaded in")
    tmux.run("resize-window", "-x", "60", "-y", "15")
    tmux.sees("smollm2-135m", "Send")
    tmux.run("resize-window", "-x", "120", "-y", "40")
    tmux.type("hello")
    tmux.sees("hello")
    tmux.press("C-z")
    tmux.sees("Stopped")
    tmux.ask("fg")
    tmux.sees("hello", "Send")
    tmux.press("Enter")
    tmux.sees("first token after")
    tmux.run("kill-server")  # SIGHUP
    tmux.until(lambda _: not tmux.engines())
    store = SessionStore(tmux.home / "data" / "sessions.db")
    (entry,) = store.sessions()
    assert [message.role for message in store.branch(entry.session.id)] == ["user", "assistant"]
    store.close()
