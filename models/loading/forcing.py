"""Teacher forcing: a given text through a network by the engine's own passes, with the logits of scored rows.

`begin` prefills a context. `score` feeds a text after it, as decode steps or prefill chunks, and yields logits. After
the last of them the cache holds the context again; a caller that stops earlier has to call `begin` or `end`.

`bench --quality`, `quantize` and the choice of 8-bit activations compare networks by it, and give each the same tokens.
T: tokens, V: vocabulary, E: hidden size.

Guard: tests/app/bench/quality/test_quality_run.py.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from headrace.runtime.engine.prefill import prefill
from headrace.runtime.engine.prompt_chunks import ChunkSizer
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase

CHUNK = 128  # rows of logits at a time: 128 MiB with a vocabulary of 256k


class Scores(Protocol):
    """Logits of a text, by a network (`TeacherForcing`) or by another program.

    `TeacherForcing.score` has one more parameter, `finish`: other programs give logits only.
    """

    seconds: float
    """Time of the scored passes."""

    def begin(self, context: Sequence[int]) -> None:
        """Drop everything and prefill `context`."""

    def score(self, fed: Sequence[int], phase: Phase) -> Iterator[mx.array]:
        """Feed tokens after the context, one by one or in chunks; yield logits (T, V), CHUNK rows at a time."""

    def end(self) -> None:
        """Release the cache."""


class TeacherForcing:
    """One network, fed at most `limit` tokens. tick: called between passes; may raise to stop.

    The network is on one machine: its passes have no limit on a wait for ranks (`runtime.network.waiting_for_ranks`).
    """

    def __init__(self, network: Network, limit: int, tick: Callable[[], None] = lambda: None) -> None:
        self.network = network
        self.seconds = 0.0  # of scored passes
        self._tick = tick
        self._kv = network.kv_backend(KVOptions(limit))  # of one sequence
        self._sizer = ChunkSizer()
        self._context: Sequence[int] = ()
        self._cache: KVCache | None = None

    def begin(self, context: Sequence[int]) -> None:
        """Drop everything and prefill `context`."""
        self.end()
        self._context = context
        self._cache = self._kv.acquire(())
        for _ in prefill(self.network, self._kv, self._cache, context, self._sizer):
            self._tick()
        self._cache.mark()

    def score(
        self, fed: Sequence[int], phase: Phase, finish: Callable[[mx.array], mx.array] | None = None
    ) -> Iterator[mx.array]:
        """Feed tokens after the context, one by one or in chunks; yield logits (T, V), CHUNK rows at a time.

        finish: maps the last layer's rows (T, 1, E) to the yielded ones; None: the network's logits.
        """
        finish = finish or self.network.logits
        for at in range(0, len(fed), CHUNK):
            piece = fed[at : at + CHUNK]
            passes = [piece]
            if phase == "decode":
                passes = [[token] for token in piece]
            yield mx.concatenate([self._feed(tokens, phase, finish) for tokens in passes])
        self._go_back()

    def end(self) -> None:
        """Release the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
            self._kv.trim()

    def _feed(self, tokens: Sequence[int], phase: Phase, finish: Callable[[mx.array], mx.array]) -> mx.array:
        """Feed tokens in one pass; return their rows, mapped by `finish`."""
        network = self.network
        cache = self._cache
        count = len(tokens)
        began = time.perf_counter()
        assert cache is not None
        kv_pass = one_pass(self._kv, cache, count, phase)
        x = network.layers(network.embed(mx.array([list(tokens)], mx.uint32)), kv_pass)  # (1, T, E)
        rows = finish(x.reshape(count, 1, *x.shape[2:]))  # rows as sequences of one token
        kv_pass.advance()
        mx.eval(rows, kv_pass.arrays)
        cache.commit(count)
        self.seconds += time.perf_counter() - began
        self._tick()
        return rows

    def _go_back(self) -> None:
        """Have the cache hold the context alone: by a rollback, or else by a new prefill."""
        length = len(self._context)
        assert self._cache is not None
        if length and self._cache.reachable(length) == length:
            self._cache.trim(length)
        else:
            self.begin(self._context)
