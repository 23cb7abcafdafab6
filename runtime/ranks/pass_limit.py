"""Time limit of a pass on several ranks.

It ends the wait for a rank that hangs, which still sends heartbeats. The limit follows earlier passes: several times
the slowest pass of decoding, or of as many prompt tokens.

`Leader` watches it in a thread, and ends all ranks beyond it. So it must never be too short for a healthy rank: LEAST_S
and FIRST_S leave room for a busy machine. All waits for the ranks are within `waiting`: `Engine.step`, the chunks of
`prefill`, the freeing of memory after work, and the calls of `LeaderBackend` that the followers answer.

Guard: tests/runtime/ranks/test_pass_limit.py.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.runtime.kv.cache import PassRow
from headrace.runtime.ops import Phase
from headrace.runtime.ranks.peer_connection import BEAT_S

LEAST_S = 8.0  # any later pass
FIRST_S = 120.0  # the first of its kind, which may read weights from disk
_TIMES = 8.0  # times the slowest pass so far: room for a pass beside other programs


class PassLimit:
    """The limit of the pass that rank 0 waits for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The engine's thread writes these, and `exceeded` reads them on another, each in one operation under the
        # interpreter lock.
        self._since: float | None = None  # None: rank 0 waits for no pass
        # Prompt tokens of the pass in flight and of the next, which is built ahead; fewer before the first two passes.
        self._prompts: deque[int] = deque(maxlen=2)
        self._slowest: dict[Phase, float] = {}  # seconds of a decoding pass; of "prefill": of one prompt token

    def watch(self, over: threading.Event, lose: Callable[[str], None]) -> None:
        """Call `lose` with the reason if a pass does not end, in a thread that lives until `over`."""

        def wait() -> None:
            while not over.wait(BEAT_S):
                limit = self.exceeded()
                if limit is not None:
                    lose(f"has not finished a pass in {limit:.0f} s")

        threading.Thread(target=wait, name="watch passes", daemon=True).start()

    def made(self, rows: Sequence[PassRow]) -> None:
        """Take the rows of a pass that is built."""
        self._prompts.append(sum(row.count for row in rows if row.phase != "decode"))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a pass within this block. It may be nested: the outermost block has the limit."""
        if self._since is not None:
            yield
            return
        was_made = bool(self._prompts)  # a pass before this block, so the block waits for one
        since = self._clock()
        self._since = since
        try:
            yield
        finally:
            self._since = None
        # A pass that raises is not measured: its time says nothing of later ones.
        prompt = max(self._prompts, default=0)
        # A block that only starts the first pass of decoding is short, and says nothing of the passes after it.
        if not prompt and not was_made:
            return
        phase = _phase(prompt)
        seconds = (self._clock() - since) / (prompt or 1)
        self._slowest[phase] = max(seconds, self._slowest.get(phase, 0.0))

    def exceeded(self) -> float | None:
        """Return the limit in seconds if rank 0 has waited longer, None if not. For other threads."""
        since = self._since  # once: the engine's thread may set it to None after the check
        if since is None:
            return None
        prompt = max(self._prompts, default=0)
        limit = FIRST_S
        slowest = self._slowest.get(_phase(prompt))
        if slowest is not None:
            limit = max(LEAST_S, _TIMES * slowest * (prompt or 1))
        if self._clock() - since <= limit:
            return None
        return limit


def _phase(prompt_tokens: int) -> Phase:
    """Return the phase by which a pass with so many prompt tokens is timed."""
    return "prefill" if prompt_tokens else "decode"
