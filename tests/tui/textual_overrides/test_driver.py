"""The driver on a real pseudo-terminal: every key arrives, a paste is text, and leaving is in order."""

import asyncio
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
from textual.app import App

from headrace.app.tui.textual_overrides import driver
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, sys
from textual import events
from textual.app import App
from textual.widgets import Label
from headrace.app.tui.textual_overrides.driver import TerminalDriver

class Keys(App):
    def compose(self):
        yield Label("here")
    def on_ready(self):
        self.tell("ready")
    def on_key(self, event):
        self.query_one(Label).update(event.key)
        self.call_after_refresh(self.tell, event.key)
        if event.key == "q":
            self.exit()
    def on_paste(self, event):
        self.tell(f"pasted {event.text}")
    def tell(self, what):
        os.write(int(sys.argv[1]), f"{what}\\n".encode())

Keys(driver_class=TerminalDriver).run()
"""


class Keys:
    """An app that tells which keys it saw."""

    def __init__(self) -> None:
        self.screen, theirs = pty.openpty()
        self._told, tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tell)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color"},
            pass_fds=[tell],
            start_new_session=True,
        )
        os.close(theirs)
        os.close(tell)
        self.drawn = b""
        self._lines = b""

    def type(self, keys: bytes) -> None:
        os.write(self.screen, keys)

    def told(self) -> str:
        """The next thing it tells; meanwhile what it draws is read."""
        while b"\n" not in self._lines:
            ready = select.select([self.screen, self._told], [], [], PATIENCE_S)[0]
            assert ready, self.drawn[-2000:]
            if self.screen in ready:
                self.drawn += os.read(self.screen, 1 << 16)
            if self._told in ready:
                self._lines += os.read(self._told, 1 << 16)
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode()

    def rest(self) -> None:
        """Read what it draws until it ends."""
        while self.process.poll() is None:
            if select.select([self.screen], [], [], 0.05)[0]:
                try:
                    self.drawn += os.read(self.screen, 1 << 16)
                except OSError:
                    break
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)
        os.close(self._told)


@pytest.fixture
def keys() -> Iterator[Keys]:
    keys = Keys()
    assert keys.told() == "ready"
    yield keys
    keys.close()


def test_keys_are_read_from_sequences_and_parts_of_them(keys: Keys) -> None:
    keys.type(b"a")
    assert keys.told() == "a"
    keys.type(b"\x1b")  # alone: after a while it is Escape
    assert keys.told() == "escape"
    keys.type(b"b")
    assert keys.told() == "b"
    keys.type("é".encode()[:1])
    keys.type("é".encode()[1:])
    assert keys.told() == "é"
    keys.type(b"\xff")  # no UTF-8 at all
    assert keys.told()
    keys.type(b"\x1b[A")
    assert keys.told() == "up"
    keys.type(b"\x1b[200~log \x1b[31mred q after\x1b[201~")
    assert keys.told() == "pasted log \x1b[31mred q after"
    keys.type(b"\x1b[200~two\nlines\x1b[201~")
    assert (keys.told(), keys.told()) == ("pasted two", "lines")


def test_quitting_ends_the_input_thread(keys: Keys) -> None:
    keys.type(b"q")
    keys.rest()
    assert keys.process.returncode == 0
    assert b"\x1b[?1049l" in keys.drawn  # the terminal is as it was


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"", ""),
        (b"hi\n", "h i enter"),
        (b"a\nb", "a enter b"),
        (b"a\nb\nc", "a ctrl+j b ctrl+j c"),
        (b"a\nb\n", "a ctrl+j b enter"),
    ],
)
def test_enter_before_the_start_is_enter(typed: bytes, keys: str) -> None:
    """A terminal that is not in raw mode yet turns it into a line break."""
    ours, theirs = os.pipe()
    os.write(theirs, typed)
    seen: list[str] = []

    async def run() -> None:
        reading = driver.TerminalDriver(App[None](), mouse=False)
        reading.fileno = ours
        reading.process_message = lambda message: seen.append(getattr(message, "key", ""))  # type: ignore[method-assign]
        thread = reading._key_thread = Thread(target=reading.run_input_thread)
        thread.start()
        while len(seen) < len(keys.split()):
            sleep(0.001)
        os.write(theirs, b"x")
        while not seen or seen[-1] != "x":
            sleep(0.001)
        reading.disable_input()

    asyncio.run(run())
    assert seen == [*keys.split(), "x"]
    os.close(ours)
    os.close(theirs)
