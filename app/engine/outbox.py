"""Text and records of one answer on their way to the chat: the first text at once, then what is gathered meanwhile.

Where decoding takes every core, what a message costs is taken from the decode.
"""

import time
from collections.abc import Callable

from headrace.app.engine.messages import Delta, Event, Generate
from headrace.runtime.metrics.telemetry import StepRecord

_GATHER_S = 0.07  # between two deltas: the chat looks less often, and hardly ever in vain
_RECORDS_S = 0.4  # between two that bring the records of steps, from which figures are made

Send = Callable[[Event], None]


class Outbox:
    """Sends the deltas of one answer. ttft_s: seconds from the request to its first text, once there is one."""

    def __init__(self, command: Generate, send: Send, opening: str) -> None:
        """opening: text that belongs to the answer though the template wrote it; it goes with the first of the
        model's."""
        self._command = command
        self._send = send
        self._opening = opening
        self._text: list[str] = []
        self._size = 0  # of that text
        self._guessed: list[tuple[int, int]] = []  # where in it
        self._records: list[StepRecord] = []
        self._sent = self._records_sent = float("-inf")
        self.ttft_s: float | None = None

    def add(self, text: str, record: StepRecord | None = None, guessed: int = 0) -> None:
        """More of the answer, of which so many characters at the beginning had been guessed; sent if it is time."""
        now = time.monotonic()
        if record is not None:
            self._records.append(record)
        if text:
            begins = self._size + len(self._opening)
            if guessed:
                self._guessed.append((begins, begins + guessed))
            text, self._opening = self._opening + text, ""
            self._text.append(text)
            self._size += len(text)
            if self.ttft_s is None:
                self.ttft_s = now - self._command.submitted
                self._sent = float("-inf")  # the first text goes at once
        if now - self._sent >= _GATHER_S:
            self._flush(with_records=now - self._records_sent >= _RECORDS_S)

    def flush(self) -> None:
        """Send all there is."""
        self._flush(with_records=True)

    def _flush(self, *, with_records: bool) -> None:
        records: list[StepRecord] = []
        if with_records:
            records, self._records = self._records, records
        if self._text or records:
            text, guessed = "".join(self._text), tuple(self._guessed)
            self._send(Delta(self._command.id, text, tuple(records), self.ttft_s, guessed))
            self._text, self._guessed, self._size = [], [], 0
        self._sent = time.monotonic()
        if records:
            self._records_sent = self._sent
