"""Detokenizers of an answer that write or leave out the marks of a family around its parts.

    RecipientStream   Functionary's recipients: `>>>all` for the user, else a tool
    ResponseStream    the `<response>` tags around an answer of Granite 3.2 and 3.3, which their templates ask for
    MarkedStream      control tokens with a text, around the tool calls of any family

`Tokenizer.answer_stream` puts them around the model's detokenizer, by its template. Those of thinking are in
`thinking_forms`.

Guard: tests/models/text/test_answer_streams.py.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.models.text.stop_strings import half_length
from headrace.models.text.thinking import ThinkingSplitter

if TYPE_CHECKING:
    from headrace.models.text.detokenizer import Detokenizer


class MarkedStream:
    """Detokenizer that writes a text for some control tokens, which others drop. texts: by id."""

    def __init__(self, inner: "Detokenizer", texts: Mapping[int, str]) -> None:
        self._inner = inner
        self._texts = texts

    def add(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return self._inner.add(token_id) if text is None else text

    def finish(self, *, cut: bool = False) -> str:
        return self._inner.finish(cut=cut)


# Recipients. The prompt ends with the mark, so an answer begins with a name alone: "all\nWait.>>>get_weather\n{}".
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


# Response tags
_OPEN = "<response>"
_CLOSE = "</response>"


def asks_for_tags(template: str) -> bool:
    """Return whether a chat template asks for the tags."""
    return f"{_OPEN}{_CLOSE}" in template


class ResponseStream:
    """Detokenizer that leaves out the tags around an answer; others stay."""

    def __init__(self, inner: "Detokenizer", *, thinks: bool = False) -> None:
        """thinks: the prompt has begun a thinking section."""
        self._inner = inner
        self._splitter = ThinkingSplitter(thinks=thinks)
        self._pending = ""
        self._is_tagged: bool | None = None  # None: the answer has not begun

    def add(self, token_id: int) -> str:
        """Return the text that this token completed."""
        section, content = self._splitter.feed(self._inner.add(token_id))
        return section + self._answer(content)

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: see `ThinkingStream`."""
        section, content = self._splitter.finish(self._inner.finish(cut=cut))
        content = self._answer(content)
        pending = self._pending
        self._pending = ""
        if self._is_tagged and pending.startswith(_CLOSE):
            pending = ""
        return section + content + pending

    def _answer(self, text: str) -> str:
        """Return the certain text of the answer after more of it, and hold back the rest."""
        self._pending += text
        if self._is_tagged is None:
            start = self._pending.lstrip()
            if _OPEN.startswith(start):
                return ""
            self._is_tagged = start.startswith(_OPEN)
            if self._is_tagged:
                self._pending = start.removeprefix(_OPEN).lstrip("\n")
        end = len(self._pending)
        if self._is_tagged:
            end = self._content_length()
        text = self._pending[:end]
        self._pending = self._pending[end:]
        return text

    def _content_length(self) -> int:
        """Return the length of the text before a closing tag, or half of one, that nothing but spaces follows."""
        index = self._pending.rfind("<")
        if index < 0:
            return len(self._pending)
        rest = self._pending[index:]
        if _CLOSE.startswith(rest) or (rest.startswith(_CLOSE) and not rest[len(_CLOSE) :].strip()):
            return index
        return len(self._pending)
