"""Orderly exit after a hangup (SIGHUP) or a request to end (SIGTERM, SIGINT).

Writes to a terminal that is gone can block the event loop for ever. So signals are handled outside the loop, such a
terminal is not restored, and a loop that does not react is abandoned: received text is in the store.

A process without a controlling terminal gets no SIGHUP, so the terminal is checked, too.

Textual mounts no widgets after an exit request and then misses those of a screen under construction. So the exit waits
until all are mounted (docs/workarounds.md).

The chat (`app.py`) and `headrace top` (`top.py`) call both functions. tests/tui/test_tmux_real.py hangs up real
terminals.
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

_TERMINAL_CHECK_S = 1.0  # between two checks of the terminal
_EXIT_WITHIN_S = 10.0  # for the loop to come back and the engine to end
_MOUNT_WITHIN_S = 5.0  # that a screen gets to be constructed
_MOUNT_CHECK_S = 0.01  # between two checks of it


def end_on_signals(app: App[Any], leave: Callable[[], None]) -> None:
    """Call `leave` and exit on these signals. Called inside the event loop."""
    loop = asyncio.get_running_loop()

    def end(code: int) -> None:
        try:
            leave()
        finally:
            if _terminal_is_gone():
                os._exit(code)  # textual would write to the terminal, and wait for ever
            when_mounted(app, lambda: app.exit(return_code=code))

    def handle_signal(number: int, _frame: FrameType | None) -> None:
        """End the app in its loop, or this process if the loop does not come back."""
        last_resort = threading.Timer(_EXIT_WITHIN_S, os._exit, (128 + number,))
        last_resort.daemon = True
        last_resort.start()
        loop.call_soon_threadsafe(end, 128 + number)

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle_signal)

    def watch() -> None:
        while not _terminal_is_gone():
            time.sleep(_TERMINAL_CHECK_S)
        handle_signal(signal.SIGHUP, None)

    threading.Thread(target=watch, daemon=True).start()


def when_mounted(app: App[Any], then: Callable[[], object]) -> None:
    """Call `then` once all widgets of all screens are mounted, at the latest after _MOUNT_WITHIN_S."""
    deadline = time.monotonic() + _MOUNT_WITHIN_S

    def check() -> None:
        nodes = (node for screen in app.screen_stack for node in screen.walk_children(Widget, with_self=True))
        if all(node.is_mounted for node in nodes) or time.monotonic() >= deadline:
            then()
        else:
            asyncio.get_running_loop().call_later(_MOUNT_CHECK_S, check)

    check()


def _terminal_is_gone() -> bool:
    try:
        termios.tcgetattr(sys.__stdin__)  # type: ignore[arg-type]  # None raises TypeError
    except (termios.error, OSError, ValueError, TypeError):
        return True
    return False
