"""Arguments of tool calls before a call is complete, where they are JSON."""

import re

from headrace.models.text.tools.call import CallDelta
from headrace.models.text.tools.json_value import Brackets


class CallDeltas:
    """The calls at the beginning of a text that grows. head: see `ToolForm`."""

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head = head
        self._count = 0  # complete calls
        self._waiting: list[CallDelta] = []
        self._number = 0  # calls of the text whose arguments have ended
        self._behind = self._sent = 0  # places in the text: behind these arguments, behind what was taken
        self._name = ""
        self._open: Brackets | None = None

    def read(self, text: str) -> bool:
        """Take the arguments in the text; return False while they are incomplete."""
        while True:
            if self._open is None:
                if (head := self._head.search(text, self._behind)) is None:
                    return True
                self._open, self._name, self._sent = Brackets(head.end()), head[1], head.end()
            self._open.scan(text)
            if self._open.place > self._sent:
                piece = text[self._sent : self._open.place]
                self._waiting.append(CallDelta(self._count + self._number, self._name, piece))
                self._sent = self._open.place
            if not self._open.closed:
                return False
            self._behind, self._open = self._open.place, None
            self._number += 1

    def completed(self, count: int) -> None:
        """Count the text's first calls as complete."""
        self._count += count
        self._number = max(0, self._number - count)

    def dropped(self, length: int) -> None:
        """Go on without the first characters of the text."""
        self._behind, self._sent = max(0, self._behind - length), max(0, self._sent - length)
        if self._open is not None:
            self._open.place -= length

    def take(self) -> tuple[CallDelta, ...]:
        """Return the arguments since the last time."""
        found, self._waiting = tuple(self._waiting), []
        return found
