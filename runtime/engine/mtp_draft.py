"""Draft tokens from a checkpoint's multi-token prediction head, with K/V of its own.

The head's entry of position t needs the hidden state of t and token t + 1, and predicts token t + 2. Entries of
committed positions have the network's hidden states. The head continues from its own ones, one draft token after the
other, and those entries are rolled back. The sequence's sampler chooses with the random keys of the same positions, as
for a draft model (`runtime.engine.draft_model`).

Hidden states wait until draft tokens are wanted, the newest MAX_WAITING of them. Positions whose hidden states never
came (a reused prefix) have no entry: the head attends to later ones only.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.metrics.running_median import RunningMedian
from headrace.runtime.network import DraftHead
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.acceptance import Acceptance
from headrace.runtime.speculation.dry_run import DryRun

MAX_WAITING = 2048  # hidden states
_CHUNK = 256  # entries of a pass that only catches up
_COSTS = 9  # in the median


class MtpDraft:
    """Draft tokens for one sequence of at most `limit` entries.

    head: the multi-token prediction head.
    limit: cache entries of the sequence.
    acceptance: by index in the draft, shared by sequences.
    sampler: returns a fork of the sequence's sampler.
    """

    source = "mtp"
    needs_all_tokens = True
    dry_run: DryRun | None = None

    def __init__(self, head: DraftHead, limit: int, acceptance: Acceptance, sampler: Callable[[], Sampler]) -> None:
        self.is_wanted = True
        self._head = head
        self._acceptance = acceptance
        self._sampler = sampler
        self._limit = limit
        self._costs = RunningMedian(_COSTS)
        self._waiting: deque[mx.array] = deque()  # hidden states (1, T, E) without an entry, in order
        self._next = 0  # position of the next committed entry
        self._end = 0  # position after the newest hidden state
        self._open()
        self._tokens: Sequence[int] = ()
        self._known = 0  # tokens at the last proposal
        self._draft_tokens: Sequence[int] = ()

    @property
    def cost_s(self) -> float:
        return self._costs.median or 0.0

    def close(self) -> None:
        """Free the head's K/V; no draft tokens are proposed afterwards."""
        self._cache.close()

    def take(self, start: int, hidden: mx.array) -> None:
        """See `TakesHidden`. Positions that were taken before are skipped."""
        known = self._end - start
        if known < 0:
            self._restart(start)
        elif known:
            hidden = hidden[:, known:]
        if not hidden.shape[1]:
            return
        self._waiting.append(hidden)
        self._end += hidden.shape[1]
        if self._end - self._next > MAX_WAITING:
            while self._waiting and self._end - self._next > MAX_WAITING:
                self._next += self._waiting.popleft().shape[1]
            self._restart(self._next, self._waiting)

    def update(self, tokens: Sequence[int]) -> None:
        came = tokens[self._known : self._known + len(self._draft_tokens)]
        self._acceptance.record_draft(came, self._draft_tokens)
        self._tokens = tokens
        self._known = len(tokens)
        self._draft_tokens = ()

    def chances(self, count: int) -> Sequence[float]:
        return [self._acceptance.chance(index) for index in range(count)]

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. No draft tokens while the head is more than a chunk behind: each call appends one."""
        self._cache.rollback()
        last = len(self._tokens) - 2  # the position before the newest token: its entry predicts the next one
        if self._end != last + 1 or self._next > last:
            return ()
        began = time.perf_counter()
        tokens, hidden = self._feed(min(_CHUNK, last + 1 - self._next))
        if self._next <= last:
            mx.eval(hidden)
            return ()
        sampler = self._sampler()
        chosen: list[mx.array] = []
        while True:
            chosen.append(sampler(self._head.logits(hidden)))
            if len(chosen) == count:
                break
            tokens = chosen[-1][None]
            hidden = self._append(tokens, hidden[:, -1:])
        draft_tokens = read_ints(mx.concatenate(chosen))
        self._draft_tokens = draft_tokens
        self._costs.add((time.perf_counter() - began) / count)
        return draft_tokens

    def _feed(self, count: int) -> tuple[mx.array, mx.array]:
        """Append and commit the next `count` entries; return their tokens and hidden states."""
        parts = list[mx.array]()  # (1, t, E), together `count` positions
        lacking = count
        while lacking:
            hidden = self._waiting.popleft()
            if hidden.shape[1] > lacking:
                self._waiting.appendleft(hidden[:, lacking:])
                hidden = hidden[:, :lacking]
            parts.append(hidden)
            lacking -= hidden.shape[1]
        tokens = mx.array([self._tokens[self._next + 1 : self._next + 1 + count]], mx.uint32)
        result = self._append(tokens, mx.concatenate(parts, axis=1))
        self._cache.commit(count)
        self._next += count
        return tokens, result

    def _append(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Append the entries of tokens (1, T) and the hidden states before them (1, T, E) -> (1, T, E)."""
        count = tokens.shape[1]
        kv_pass = one_pass(self._kv, self._cache, count, "decode" if count == 1 else "prefill")
        result = self._head.hidden(tokens, hidden, kv_pass)
        kv_pass.advance()
        return result

    def _restart(self, start: int, waiting: Sequence[mx.array] = ()) -> None:
        """Drop all entries; the next one is of position `start`."""
        self._cache.close()
        self._open()
        self._waiting = deque(waiting)
        self._next = start
        self._end = start + sum(hidden.shape[1] for hidden in waiting)

    def _open(self) -> None:
        self._kv = self._head.kv_backend(KVOptions(self._limit))
        self._cache = self._kv.acquire(())
