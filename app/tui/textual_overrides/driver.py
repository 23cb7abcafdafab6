"""Textual's Unix driver with another input thread.

Pastes stay text (see `paste`). Bytes that are not UTF-8 are replaced; they would end textual's thread. A closed
terminal is not read in a loop. Enter, pressed before the program had the terminal, is Enter: until then terminals turn
it into a line break. Output does not rely on how the terminal counts emoji (see `columns`).

Guard: tests/tui/textual_overrides/test_driver.py.
"""

import os
import select
import sys
import termios
from codecs import getincrementaldecoder
from fcntl import ioctl
from typing import Any

from textual.drivers.linux_driver import LinuxDriver

from headrace.app.tui.textual_overrides.background import QUESTION, BackgroundReply, can_query
from headrace.app.tui.textual_overrides.columns import count_vowel_signs, with_columns
from headrace.app.tui.textual_overrides.paste import PasteParser

_CHUNK = 1 << 12  # bytes of a read
_LOOK_S = 0.1  # between looks for the end of an escape sequence, and for the end


class TerminalDriver(LinuxDriver):
    """A LinuxDriver with PasteParser."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count_vowel_signs()
        self._ground = BackgroundReply()

    def write(self, data: str) -> None:
        """Write output, with the columns of characters that terminals count in different ways."""
        super().write(with_columns(data))

    def run_input_thread(self) -> None:
        """Read input and post its events until `disable_input`."""
        parser = PasteParser(self._debug, self._ground)
        decode = getincrementaldecoder("utf-8")("replace").decode
        if early := decode(self._read_early()):
            for event in parser.feed(early):
                self.process_message(event)
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], _LOOK_S)[0]:
                data = self._read()
                if not data:  # the terminal is gone: `app.tui.hangup` sees to that
                    self.exit_event.wait(_LOOK_S)
                if text := decode(data):
                    for event in parser.feed(text):
                        self.process_message(event)
            for event in parser.tick():
                self.process_message(event)

    def _read_early(self) -> bytes:
        """Return the keys typed before the terminal was in raw mode, with the Enter that sends it.

        A line break at the end is Enter, and so is one alone. Several are pasted text.
        """
        try:
            count = int.from_bytes(ioctl(self.fileno, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:
            count = 0
        early = os.read(self.fileno, count) if count else b""
        if early.endswith(b"\n") or early.count(b"\n") == 1:
            before, _, after = early.rpartition(b"\n")
            early = before + b"\r" + after
        return early

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, _CHUNK)
        except OSError:
            return b""


class BackgroundQueryDriver(TerminalDriver):
    """A TerminalDriver that queries the background colour; the reply is posted as `BackgroundColour`."""

    def start_application_mode(self) -> None:
        super().start_application_mode()  # type: ignore[no-untyped-call]  # of textual
        if can_query():
            self._ground.awaited = True
            self.write(QUESTION)
            self.flush()
