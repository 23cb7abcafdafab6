"""Textual's driver for Unix terminals, without wakings that bring nothing.

Textual looks for input ten times a second, and hands an update over to its writing thread in three pieces where the
terminal knows synchronized updates. Each of these wakes a thread, and while all cores decode that takes one of them
away. Here a thread waits for the terminal, and an update is one piece. The methods below are textual's own.
"""

import os
import select
import time
from codecs import getincrementaldecoder
from typing import Any

from textual import constants
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

_CHUNK = 1 << 12
_LOOK_S = 0.1  # between looks for the end of an escape sequence that may go on
_UNSURE_S = _LOOK_S + 2 * constants.ESCAPE_DELAY  # so long after input it may be a lone Escape that still waits


class QuietDriver(LinuxDriver):
    """A LinuxDriver that sleeps until there is something to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update: list[str] | None = None  # the pieces of a synchronized update that is being written
        self._wake_read, self._wake_write = os.pipe()  # ends the waiting for input

    def write(self, data: str) -> None:
        if data == SYNC_START:
            self._update = []
        if self._update is None:
            super().write(data)
            return
        self._update.append(data)
        if data == SYNC_END:
            data, self._update = "".join(self._update), None
            super().write(data)

    def disable_input(self) -> None:
        os.write(self._wake_write, b"!")
        super().disable_input()
        os.read(self._wake_read, 1)

    def run_input_thread(self) -> None:
        """Wait for input and pass it on, until `disable_input`."""
        parser, decode = XTermParser(self._debug), getincrementaldecoder("utf-8")("replace").decode
        unsure_until = 0.0
        while True:
            unsure = time.monotonic() < unsure_until
            ready = select.select([self.fileno, self._wake_read], [], [], _LOOK_S if unsure else None)[0]
            if self.fileno in ready:
                unsure_until = time.monotonic() + _UNSURE_S
                data = self._read()
                if not data:  # the terminal is gone: `app.tui.hangup` sees to that
                    self.exit_event.wait(_LOOK_S)
                if text := decode(data):
                    for event in parser.feed(text):
                        self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
            if self._wake_read in ready:
                return

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, _CHUNK)
        except OSError:
            return b""
