"""Separation of an answer's text from its tool calls, piece by piece.

Text that may begin a call is held back until it is one, or cannot be one; then it is text. Thinking is passed on as it
is: calls begin after it, or end it, where a model goes straight from its thinking to a call at the end of the answer.

Guard: tests/models/text/tools/test_round_trip.py.
"""

import re
from collections.abc import Mapping, Sequence

from headrace.models.text.stop_strings import half_length
from headrace.models.text.thinking import CLOSE, CLOSING, OPEN
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.models.text.tools.form import MarkupTokens, ToolForm
from headrace.models.text.tools.json_value import Brackets


class CallDeltas:
    """The calls at the beginning of a text that grows. head: see `ToolForm`."""

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head = head
        self._count = 0  # complete calls
        self._waiting: list[CallDelta] = []  # for `take`
        self._number = 0  # calls of the text whose arguments have ended
        self._end = 0  # in the text, of these arguments
        self._sent = 0  # in the text: the end of what was taken
        # The incomplete call's name and brackets; None between calls
        self._name = ""
        self._open: Brackets | None = None

    def read(self, text: str) -> bool:
        """Take the arguments in the text; return False while they are incomplete."""
        while True:
            if self._open is None:
                head = self._head.search(text, self._end)
                if head is None:
                    return True
                self._open = Brackets(head.end())
                self._name = head[1]
                self._sent = head.end()
            self._open.scan(text)
            if self._open.position > self._sent:
                piece = text[self._sent : self._open.position]
                self._waiting.append(CallDelta(self._count + self._number, self._name, piece))
                self._sent = self._open.position
            if not self._open.closed:
                return False
            self._end = self._open.position
            self._open = None
            self._number += 1

    def completed(self, count: int) -> None:
        """Count the text's first calls as complete."""
        self._count += count
        self._number = max(0, self._number - count)

    def dropped(self, length: int) -> None:
        """Go on without the first characters of the text."""
        self._end = max(0, self._end - length)
        self._sent = max(0, self._sent - length)
        if self._open is not None:
            self._open.position -= length

    def take(self) -> tuple[CallDelta, ...]:
        """Return the arguments since the last time."""
        deltas = tuple(self._waiting)
        self._waiting = []
        return deltas


class ToolStream:
    """The calls of one answer, in one form.

    marks: by id, the texts of control tokens that `feed` takes.
    """

    def __init__(self, form: ToolForm, marks: MarkupTokens, *, thinking: bool = False, certain: bool = False) -> None:
        """thinking: the prompt has begun a thinking section.

        certain: a grammar has every beginning of a call become one, so its arguments are given before its end.
        """
        self._form = form
        self._marks = marks
        self.marks: Mapping[int, str] = marks.character_of
        self._pending = ""  # text that is held back
        self._begins: Sequence[str] = form.begins
        self._thinks = thinking  # within the section
        self._at_start = True  # only spaces so far, after any thinking
        self._after_call = False  # spaces between calls are no text
        self._deltas: CallDeltas | None = None
        if certain and form.head is not None:
            self._deltas = CallDeltas(form.head)

    def take_deltas(self) -> tuple[CallDelta, ...]:
        """Return the arguments that have come since the last time, of calls that are not complete."""
        if self._deltas is None:
            return ()
        return self._deltas.take()

    def feed(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that is no call, and the calls that it completes."""
        self._pending += text
        return self._take(final=False)

    def finish(self, text: str = "", *, cut: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
        """End the stream: return the rest.

        cut: the answer is incomplete. A call that has its name is one, with the arguments so far; half a head is text.
        """
        released, calls = self.feed(text)
        if cut and self._within_call:
            cut_calls = self._form.cut_calls(self._pending)
            if cut_calls:
                self._pending = ""
                return released, calls + cut_calls
        more, last = self._take(final=True)
        return released + more, calls + last

    @property
    def _within_call(self) -> bool:
        """True if the pending text is the beginning of a call, its markup complete."""
        pending = self._pending
        marked = any(pending.startswith(begin) for begin in self._begins)
        return not self._thinks and (marked or (self._form.bare and pending.lstrip()[:1] in "{["))

    def _take(self, *, final: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Take the complete part of the pending text, all of it if `final`: return text, and calls."""
        released: list[str] = []
        calls: list[ToolCall] = []
        while self._pending and self._step(released, calls, final=final):
            pass
        if final:
            self._release(released, len(self._pending))
        return self._marks.visible("".join(released)), tuple(calls)

    def _step(self, released: list[str], calls: list[ToolCall], *, final: bool) -> bool:
        """Take one part of the pending text: add it to `released` or `calls`. Return False if it needs more."""
        if self._thinks:
            return self._think(released, final=final)

        # Thinking may begin before all other text.
        start = self._pending.lstrip()
        if self._at_start:
            if start.startswith(OPEN):
                self._release(released, len(self._pending) - len(start) + len(OPEN))
                self._thinks = True
                self._at_start = True  # `_release` has taken the tag for text
                return True
            if not final and OPEN.startswith(start):
                return False

        # Text before a call.
        at, text_length = self._next_begin()
        if at is None:
            self._release(released, text_length)  # the rest comes with `final`
            return False
        if at and self._at_start and not self._pending[:at].strip():
            self._drop(at)  # spaces before a call are no text
            return True
        if at:
            self._release(released, at)
            return bool(self._pending)

        # A call, or text that only begins like one.
        if self._deltas is not None and not self._deltas.read(self._pending) and not final:
            return False
        reading = self._form.read(self._pending, final=final)
        if reading is None and not final:
            return False
        if reading is None or not reading.calls:
            # At least one character is text now: else the same beginning would be read again for ever.
            self._at_start = False
            length = len(self._pending)
            if reading is not None:
                length = max(1, reading.length)
            self._release(released, length)
            return bool(self._pending)
        calls += reading.calls
        if self._deltas is not None:
            self._deltas.completed(len(reading.calls))
        self._drop(reading.length)
        self._after_call = True
        self._at_start = False
        return True

    def _next_begin(self) -> tuple[int | None, int]:
        """Return the position of the first call's beginning; None, and the length of text that begins none."""
        pending = self._pending
        start = len(pending) - len(pending.lstrip())
        first = pending[start : start + 1]
        may_begin = first in ("{", "[", "`") or (first == "," and self._after_call)  # Phi-4-mini's calls have commas
        if self._form.bare and (self._at_start or self._after_call) and may_begin:
            return 0, 0
        positions = [index for begin in self._begins if (index := pending.find(begin)) >= 0]
        if positions:
            return min(positions), 0
        return None, self._without_spaces(len(pending) - half_length(pending, *self._begins))

    def _without_spaces(self, length: int) -> int:
        """Return `length`, or 0 for spaces that a call may follow."""
        if (self._after_call or self._at_start) and not self._pending[:length].strip():
            return 0
        return length

    def _think(self, released: list[str], *, final: bool) -> bool:
        """Take thinking, up to its end. See `_step`."""
        index = self._pending.find(CLOSE)
        if index >= 0:
            self._release(released, index + len(CLOSE))
            self._thinks = False
            self._at_start = True
            return True
        # A call in the thinking is one if nothing ends the thinking after it.
        begin = min((at for text in self._begins if (at := self._pending.find(text)) >= 0), default=None)
        if begin is not None:
            self._release(released, begin)
            if not final:
                return False
            reading = self._form.read(self._pending, final=True)
            if reading is not None and reading.calls:
                released.append(CLOSING)
                self._thinks = False
                self._at_start = True
                return True
        half = half_length(self._pending, CLOSE, *self._begins)
        self._release(released, len(self._pending) - half)  # the rest comes with `final`
        return False

    def _drop(self, length: int) -> str:
        """Remove the first characters of the pending text, and return them."""
        text = self._pending[:length]
        self._pending = self._pending[length:]
        if self._deltas is not None:
            self._deltas.dropped(length)
        return text

    def _release(self, released: list[str], length: int) -> None:
        """Release the first characters of the pending text; spaces after a call are dropped."""
        text = self._drop(length)
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if text.strip():
            self._at_start = False
        released.append(text)
