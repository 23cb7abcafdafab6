"""Reports of a batch of several answers: a `BatchStatus` twice a second, and one after the last answer.

`EngineHost` calls `started`, `add` and `step`. A server reports single answers, too (`always`).

Guard: tests/app/engine/test_side_by_side.py.
"""

import time
from collections.abc import Mapping

from headrace.app.engine.events import BatchStatus
from headrace.app.engine.outbox import Send
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.sequence import State

_INTERVAL_S = 0.5


class BatchMonitor:
    """Counts tokens and batch sizes from the moment several answers run until the engine is idle."""

    def __init__(self, engine: Engine, *, always: bool = False) -> None:
        """always: also for a single answer."""
        self._engine = engine
        self._always = always
        self.reset()

    def reset(self) -> None:
        """Begin anew, for an idle engine."""
        self._is_batch = False  # several answers have run at once since the engine was idle
        self._sent_at = float("-inf")
        self._tokens = 0
        self._batches: list[int] = []  # sizes since the last report

    def started(self, running: int) -> None:
        """Count an answer that started; running: answers, this one included."""
        self._is_batch = self._is_batch or running > 1 or self._always

    def add(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._tokens += tokens

    def step(self, batch: int, states: Mapping[int, State], send: Send) -> None:
        """Report a step, if it is time. batch: its size, 0 if it decoded nothing."""
        if not self._is_batch:
            if not states:
                self._tokens = 0
            return
        if batch:
            self._batches.append(batch)
        now = time.monotonic()
        ended = not states and not self._engine.has_work  # memory is freed
        if not ended and (not states or now - self._sent_at < _INTERVAL_S):
            return
        self._sent_at = now
        load = self._engine.load()
        send(
            BatchStatus(
                states=states,
                tokens=self._tokens,
                at=now,
                batches=tuple(self._batches),
                kv_used_bytes=load.kv_used_bytes,
                kv_room_bytes=load.kv_room_bytes,
                pool_bytes=load.pool_bytes,
                blocks=load.blocks,
            )
        )
        self._batches = []
        if ended:
            self.reset()
