"""Background colour of the terminal, queried by OSC 11.

The reply arrives among the keys: `ESC ] 11 ; rgb:RRRR/GGGG/BBBB` and an end (BEL or `ESC \\`). It is taken out of the
input, because textual would treat it as keys. Terminals without OSC 11 do not reply.

`BackgroundQueryDriver` asks, `PasteParser` passes the input through `BackgroundReply`, and the app changes its theme.

Guard: tests/tui/textual_overrides/test_background.py.
"""

import os
import re

from textual.message import Message

QUESTION = "\x1b]11;?\x1b\\"
_ANSWER = re.compile(  # ESC ] 11 ; rgb:1e1e/1e1e/2e2e BEL
    r"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})(?:/[0-9a-fA-F]{1,4})?(?:\x07|\x1b\\)"
)
_BEGUN = re.compile(r"\x1b\](?:1(?:1(?:;[rgba:0-9a-fA-F/]{0,24}\x1b?)?)?)?\Z")  # any beginning of it at the end
_MIDDLE = 0.5  # of the way from black to white, as bright as it looks


class BackgroundColour(Message):
    """Posted when the terminal replied."""

    def __init__(self, light: bool) -> None:
        super().__init__()
        self.light = light


class BackgroundReply:
    """Finds the reply in the input, however it is split."""

    def __init__(self) -> None:
        self.awaited = False  # the question was sent, and there is no reply yet
        self._pending = ""  # input that may begin the reply

    def take(self, data: str) -> tuple[str, BackgroundColour | None]:
        """Return the keys in `data`, and the reply once it is complete."""
        if not self.awaited:
            return data, None
        data = self._pending + data
        self._pending = ""
        if (match := _ANSWER.search(data)) is not None:
            self.awaited = False
            return data[: match.start()] + data[match.end() :], BackgroundColour(_is_light(*match.groups()))
        if (begun := _BEGUN.search(data)) is not None:
            self._pending = data[begun.start() :]
            data = data[: begun.start()]
        return data, None

    def give_up(self) -> str:
        """Return the bytes held back for a reply that did not continue: they are keys."""
        pending = self._pending
        self._pending = ""
        return pending


def can_query() -> bool:
    """Return False for terminals that would print the query."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "linux")


def _is_light(red: str, green: str, blue: str) -> bool:
    """Return whether a colour is light. Each part has 1 to 4 hexadecimal digits: `ff` and `ffff` are both full."""
    r, g, b = (int(part, 16) / (16 ** len(part) - 1) for part in (red, green, blue))
    luminance: float = 0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2  # BT.709
    return bool(luminance > _MIDDLE**2.2)
