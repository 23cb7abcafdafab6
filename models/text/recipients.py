"""Recipients at the head of an answer's parts, which Functionary writes: `>>>all` for the user, else a tool.

The prompt ends with `>>>`, so an answer begins with the name alone:

    all
    Let me look.>>>get_weather
    {"city": "Paris"}

Guard: tests/models/text/test_recipients.py.
"""

import re
from typing import TYPE_CHECKING

from headrace.models.text.stop_strings import half_length

if TYPE_CHECKING:
    from headrace.models.text.detokenizer import Detokenizer

MARK = ">>>"
_TO_USER = f"{MARK}all\n"
# A tool's name and the brace of its arguments on the next line; a beginning of that text.
_CALL = re.compile(r"[A-Za-z0-9_.:/-]{1,128}\n\s*\{")
_MAY_BE_CALL = re.compile(r"[A-Za-z0-9_.:/-]{0,128}(?:\n\s*)?")


def has_recipients(template: str) -> bool:
    """Return whether a chat template writes recipients."""
    return f"{MARK}all" in template


class RecipientStream:
    """Detokenizer that leaves out the user as a recipient, and writes the mark before a call that begins an answer."""

    def __init__(self, inner: "Detokenizer", *, calls: bool) -> None:
        """calls: the answer may have calls of tools."""
        self._inner = inner
        self._calls = calls
        self._pending = ""
        self._has_begun = False

    def add(self, token_id: int) -> str:
        """Return the text that this token completed."""
        return self._released(self._inner.add(token_id), final=False)

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: see `ThinkingStream`."""
        return self._released(self._inner.finish(cut=cut), final=True)

    def _released(self, text: str, *, final: bool) -> str:
        """Return the text that is certain, all of it if `final`; hold back the rest."""
        self._pending += text
        if not self._has_begun and not self._begin(final=final):
            return ""
        whole = self._pending.replace(_TO_USER, "")
        end = len(whole)
        if not final:
            end -= half_length(whole, _TO_USER)
        self._pending = whole[end:]
        return whole[:end]

    def _begin(self, *, final: bool) -> bool:
        """Take the recipient that an answer begins with. Return False while it may go on."""
        pending = self._pending
        first = _TO_USER.removeprefix(MARK)
        is_call = self._calls and _CALL.match(pending) is not None
        may_go_on = first.startswith(pending) or (self._calls and _MAY_BE_CALL.fullmatch(pending) is not None)
        if pending.startswith(first):
            self._pending = pending.removeprefix(first)
        elif is_call:
            self._pending = f"{MARK}{pending}"
        elif may_go_on and not final:
            return False
        self._has_begun = True
        return True
