"""A signal that ends the chat while a screen is being made: no traceback, the terminal as it was, the signal's code."""

import signal
from pathlib import Path

import pytest

from tests.faults.chat_terminal import Chat
from tests.support.patience import PATIENCE_S

SIGNAL_WHILE_MADE = """
import importlib, os
widget = getattr(importlib.import_module({module!r}), {name!r})
made = widget.compose
def compose(self):
    os.kill(os.getpid(), {number})
    yield from made(self)
widget.compose = compose
"""
MOMENTS = [  # from the outermost widget to one of the last
    ("headrace.app.tui.screens.chat_screen", "ChatScreen"),
    ("headrace.app.tui.decode.panel", "DecodePanel"),
    ("headrace.app.tui.decode.step", "StepSection"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("module", "name"), MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_the_first_screen_is_made_ends_the_chat(
    tmp_path: Path, module: str, name: str, number: int
) -> None:
    first = SIGNAL_WHILE_MADE.format(module=module, name=name, number=int(number))
    chat = Chat(tmp_path, "-m", str(tmp_path / "none"), first=first)
    try:
        assert chat.process.wait(PATIENCE_S) == 128 + number
        assert chat.tidy()
        assert b"Traceback" not in chat.written
    finally:
        chat.kill()
