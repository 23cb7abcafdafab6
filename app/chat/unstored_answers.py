"""Answers that ended and are not stored yet: where storing fails, it is tried again."""

import time
from collections import deque
from collections.abc import Callable

from headrace.app.chat.turn import RETRY_S
from headrace.runtime.errors import DeletedError


class UnstoredAnswers:
    """Calls that store one answer each, in the order of their ends. `len` is the number of those not yet stored."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._retry_at = 0.0

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def retry_due(self) -> bool:
        """True if it is time to try again."""
        return bool(self._calls) and time.monotonic() >= self._retry_at

    def add(self, store: Callable[[], None]) -> None:
        """Add an answer, which `settle` stores."""
        self._calls.append(store)

    def settle(self) -> None:
        """Store the answers. Raises SessionError as long as one fails, DeletedError for one that is given up."""
        self._retry_at = time.monotonic() + RETRY_S
        while self._calls:
            try:
                self._calls[0]()
            except DeletedError:  # by another process: not tried again
                self._calls.popleft()
                raise
            self._calls.popleft()
