"""Bracketed paste as one piece of text, whatever it contains.

Textual's parser handles escape sequences within a paste and passes unknown ones on as keys: a Ctrl+Q in pasted text
would leave the app. Here everything between `ESC [ 200 ~` and the next `ESC [ 201 ~` bypasses that parser, however the
input is split into reads.

Two states: keys (`_pasted` is None) and within a paste. The driver feeds it.
tests/tui/textual_overrides/test_paste.py cuts the bytes in every place.
"""

import time
from collections.abc import Generator, Iterable

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

from headrace.app.tui.textual_overrides.background import BackgroundReply

_NO_KEY = len("\x1b[2")  # bytes of a mark that nobody types
PATIENCE_S = 0.6  # for the rest of a mark on a slow connection


class PasteParser(XTermParser):
    """An XTermParser that parses the marks of a paste, not its text. ground: finds background replies in the input."""

    def __init__(self, debug: bool = False, ground: BackgroundReply | None = None) -> None:
        super().__init__(debug)
        self._ground = ground or BackgroundReply()
        self._pasted: list[str] | None = None  # text of an unfinished paste
        self._tail = ""  # end of the input that may begin a mark
        self._tail_at = 0.0  # time of that input
        self._gave_up = False  # textual treated the beginning as keys after a time-out

    def feed(self, data: str) -> Iterable[Message]:
        """Yield the events of the input; "" is its end."""
        if not data:
            yield from super().feed(data)
        while data:
            if self._pasted is None:
                data = yield from self._feed_keys(data)
            else:
                data = yield from self._feed_paste(data)

    def tick(self) -> Iterable[Message]:
        """Yield an unfinished escape sequence as keys, but wait PATIENCE_S for the rest of a mark."""
        if pending := self._ground.give_up():
            yield from super().feed(pending)
        if len(self._tail) >= _NO_KEY and time.monotonic() < self._tail_at + PATIENCE_S:
            return
        for message in super().tick():
            self._gave_up = True
            yield message

    def _feed_keys(self, data: str) -> Generator[Message, None, str]:
        """Handle input up to the start of a paste; return the rest."""
        seen = self._tail + data
        index = seen.find(BRACKETED_PASTE_START)
        if index < 0:
            self._tail = _beginning(seen, BRACKETED_PASTE_START)
            self._tail_at = time.monotonic()
            self._gave_up = False
            yield from self._pass_on(data)
            return ""
        taken = index + len(BRACKETED_PASTE_START) - len(self._tail)
        if not self._gave_up or index >= len(self._tail):
            # With the mark, so that textual's parser is within a paste, too, until `_feed_paste` ends it.
            yield from self._pass_on(data[:taken])
        self._pasted = []
        self._tail = ""
        self._gave_up = False
        return data[taken:]

    def _pass_on(self, data: str) -> Iterable[Message]:
        keys, ground = self._ground.take(data)
        if ground is not None:
            yield ground
        if keys:
            yield from super().feed(keys)

    def _feed_paste(self, data: str) -> Generator[Message, None, str]:
        """Handle input up to the end of the paste; return the rest."""
        assert self._pasted is not None
        seen = self._tail + data
        index = seen.find(BRACKETED_PASTE_END)
        if index < 0:
            self._tail = _beginning(seen, BRACKETED_PASTE_END)
            self._pasted.append(seen[: len(seen) - len(self._tail)])
            return ""
        text = "".join([*self._pasted, seen[:index]])
        self._pasted = None
        self._tail = ""
        # The parser's own paste ends too; it is empty.
        yield from (message for message in super().feed(BRACKETED_PASTE_END) if not isinstance(message, events.Paste))
        yield events.Paste(text.replace("\0", ""))
        return seen[index + len(BRACKETED_PASTE_END) :]


def _beginning(text: str, mark: str) -> str:
    """Return the longest proper prefix of `mark` that `text` ends with."""
    return next((mark[:size] for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), "")
