"""Textual's driver for Unix terminals with another reading of the input.

A paste stays text (see `paste`). Bytes that are no UTF-8 are replaced: textual's thread ends with an exception, and the
keyboard with it. A terminal that is gone is not read over and over until somebody notices.
"""

import os
import select
from codecs import getincrementaldecoder
from typing import Any

from textual.drivers.linux_driver import LinuxDriver

from headrace.app.tui.textual_overrides.ground import QUESTION, GroundAnswer, can_be_asked
from headrace.app.tui.textual_overrides.paste import PasteParser

_CHUNK = 1 << 12
_LOOK_S = 0.1  # between looks for the end of an escape sequence, and for the end


class TerminalDriver(LinuxDriver):
    """A LinuxDriver to which a paste is text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ground = GroundAnswer()

    def run_input_thread(self) -> None:
        """Pass on what is read, until `disable_input`."""
        parser, decode = PasteParser(self._debug, self._ground), getincrementaldecoder("utf-8")("replace").decode
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

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, _CHUNK)
        except OSError:
            return b""


class AskingDriver(TerminalDriver):
    """A TerminalDriver that asks what ground there is; a `Ground` message is posted if the terminal answers."""

    def start_application_mode(self) -> None:
        super().start_application_mode()  # type: ignore[no-untyped-call]  # of textual
        if can_be_asked():
            self._ground.awaited = True
            self.write(QUESTION)
            self.flush()
