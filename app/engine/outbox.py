"""Parts of one answer on their way out of the engine process: the first text at once, later ones in batches.

Sending costs CPU time that decoding needs. `EngineHost` has an outbox for each answer; `headrace run` stores a growing
answer through one.

Guard: tests/app/engine/test_outbox.py.
"""

import time
from collections.abc import Callable

from headrace.app.answer.answer import Answer
from headrace.app.engine.events import Delta, Event
from headrace.models.text.events import Completed, TextChunk

TEXT_S = 0.07  # between two deltas; the chat polls less often (`tui.poller.SHORTEST_S`)
SERVED_TEXT_S = 0.03  # of a server, for up to two answers at a time; longer in proportion for more

Send = Callable[[Event], None]


class Outbox:
    """Collects the parts of one answer, and sends them as deltas.

    text_s: seconds between two deltas.
    """

    def __init__(
        self, generation: int, answer: Answer, send: Callable[[Delta], None], *, text_s: float = TEXT_S
    ) -> None:
        """generation: id of the request."""
        self.text_s = text_s
        self._id = generation
        self._answer = answer
        self._send = send
        self._opening = answer.prompt.opening  # sent with the first text
        self._parts: list[TextChunk | Completed] = []
        self._sent = float("-inf")
        self._has_first = False  # the first output was added

    def add(self, part: TextChunk | Completed) -> None:
        """Add a step, or the end of the answer, and send if it is time."""
        if isinstance(part, Completed) and part.is_empty:
            return
        self._parts.append(part)
        # Steps without output may have been sent just before: the first output does not wait for `text_s`.
        is_first = not self._has_first and self._answer.ttft_s is not None
        self._has_first = self._has_first or is_first
        if is_first or part.calls or time.monotonic() - self._sent >= self.text_s:  # a delta ends with calls
            self.flush()

    def flush(self) -> None:
        """Send everything."""
        if self._parts:
            # The opening goes with the first delta that has text, and with no other one.
            opening = ""
            if any(part.text for part in self._parts):
                opening = self._opening
                self._opening = ""
            self._send(Delta(self._id, self._parts, self._answer.ttft_s, opening))
            self._parts = []
        self._sent = time.monotonic()  # the time to the next delta counts from here, also if there was nothing to send
