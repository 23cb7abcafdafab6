"""Leaving in order when the terminal was closed (SIGHUP) or somebody asked this process to end (SIGTERM; SIGINT, which
Ctrl+C is not while the keys are read as such).

A terminal that is gone, or that nobody reads any more, can hold up the event loop for ever: what was drawn waits to
be written. So the signal is heard outside the loop, a terminal that is gone is not tidied up, and a loop that does
not answer is left behind: what it took in of an answer is in the store.

A process that has no controlling terminal hears no SIGHUP and would read the end of its input for ever: so the
terminal is looked at, too.

Textual mounts no more widgets once it is told to leave, and then finds those missing that a screen under construction
asks for: so what is being made is let be made first.
"""

import asyncio
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from textual.app import App
from textual.widget import Widget

_LOOK_S = 1.0
_PATIENCE_S = 10.0  # for the loop to come back and the engine to end
_MADE_WITHIN_S, _MADE_LOOK_S = 5.0, 0.01  # of a screen under construction


def end_on_signals(app: App[Any], leave: Callable[[], None]) -> None:
    """From now on: `leave`, then out of the app with the exit code. Called inside the event loop."""
    loop = asyncio.get_running_loop()

    def end(code: int) -> None:
        try:
            leave()
        finally:
            if _terminal_is_gone():
                os._exit(code)
            when_mounted(app, lambda: app.exit(return_code=code))

    def heard(number: int, _frame: FrameType | None) -> None:
        last = threading.Timer(_PATIENCE_S, os._exit, (128 + number,))
        last.daemon = True
        last.start()
        loop.call_soon_threadsafe(end, 128 + number)

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heard)

    def watch() -> None:
        while not _terminal_is_gone():
            time.sleep(_LOOK_S)
        heard(signal.SIGHUP, None)

    threading.Thread(target=watch, daemon=True).start()


def when_mounted(app: App[Any], then: Callable[[], object]) -> None:
    """Call `then` once all widgets of all screens are mounted; after five seconds however it stands."""
    deadline = time.monotonic() + _MADE_WITHIN_S

    def look() -> None:
        nodes = (node for screen in app.screen_stack for node in screen.walk_children(Widget, with_self=True))
        if all(node.is_mounted for node in nodes) or time.monotonic() >= deadline:
            then()
        else:
            asyncio.get_running_loop().call_later(_MADE_LOOK_S, look)

    look()


def _terminal_is_gone() -> bool:
    try:
        termios.tcgetattr(sys.__stdin__)  # type: ignore[arg-type]  # None raises TypeError
    except (termios.error, OSError, ValueError, TypeError):
        return True
    return False
