"""A network wrapper that records the engine's calls."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.engine.request import Event, Finished, Request, Step
from headrace.runtime.kv.paged_cache import PagedCache
from headrace.runtime.kv.slot_cache import SlotPool
from headrace.runtime.network import Network
from headrace.runtime.ops import Projections


class WatchedNetwork:
    """Delegates to `network`; records tokens, cache positions, logits and caches.

    `on_pass(n)` is called before forward pass n (from 0) and may raise. With `forgets=True` its caches roll back to
    marks only, like recurrent state.
    """

    def __init__(
        self, network: Network[Any], *, on_pass: Callable[[int], None] = lambda _: None, forgets: bool = False
    ) -> None:
        self._network = network
        self._on_pass = on_pass
        self._forgets = forgets
        self.caches: list[Any] = []
        self.fed: list[mx.array] = []  # (1, T) per pass
        self.positions: list[tuple[int, int]] = []  # (length, committed) before each pass of one sequence
        self.attended: list[tuple[int, int]] = []  # (layer, T) of every attend call
        self.logits_seen: list[mx.array] = []  # (rows, V) per step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def make_cache(self, limit: int) -> Any:
        return self._watch(self._network.make_cache(limit))

    def make_pool(self, *arguments: Any) -> Any:
        """Return a pool of watched caches; None for caches with `forgets`."""
        pool = None if self._forgets else self._network.make_pool(*arguments)
        if pool is not None:
            name = "make_slot" if isinstance(pool, SlotPool) else "make_cache"
            make = getattr(pool, name)
            setattr(pool, name, lambda limit: self._watch(make(limit)))
        return pool

    def _watch(self, cache: Any) -> Any:
        if self._forgets:
            _forget(cache)
        if hasattr(cache, "attend"):
            attend = cache.attend

            def counting(layer: int, qkv: Projections, spec: Any) -> mx.array:
                self.attended.append((layer, (qkv if isinstance(qkv, mx.array) else qkv[0]).shape[1]))
                return attend(layer, qkv, spec)

            cache.attend = counting
        if isinstance(cache, PagedCache):
            _remember(cache)
        self.caches.append(cache)
        return cache

    def embed(self, tokens: mx.array) -> mx.array:
        self._on_pass(len(self.fed))
        self.fed.append(tokens)
        return self._network.embed(tokens)

    def layers(self, x: mx.array, cache: Any) -> mx.array:
        if hasattr(cache, "length"):
            self.positions.append((cache.length, cache.committed))
        return self._network.layers(x, cache)

    def logits(self, x: mx.array) -> mx.array:
        logits = self._network.logits(x)
        self.logits_seen.append(logits)
        return logits


def _remember(cache: Any) -> None:
    """Keep the rows of a released cache for `committed_rows`."""
    close = cache.close

    def closing() -> None:
        if cache.committed and len(cache.tables) == 1:  # with windows nobody asks for them
            cache.last_rows, cache.last_committed = committed_rows(cache), cache.committed
            mx.eval(cache.last_rows)
        close()

    cache.close = closing


def _forget(cache: Any) -> None:
    """Restrict a cache to roll back to its mark only."""
    marks: list[int] = []
    trim = cache.trim

    def mark() -> None:
        assert cache.length == cache.committed
        marks.append(cache.committed)

    def reachable(length: int) -> int:
        return length if length == cache.length else max((mark for mark in marks if mark <= length), default=0)

    def back(length: int) -> None:
        assert reachable(length) == length
        trim(length)
        marks[:] = [mark for mark in marks if mark <= length]

    def refuse() -> None:
        raise AssertionError("it cannot be rolled back")

    cache.needs_marks, cache.mark, cache.reachable, cache.trim, cache.rollback = True, mark, reachable, back, refuse


def step_by_step(network: Any, prompt: Sequence[int], steps: int) -> tuple[list[int], Any]:
    """Decode greedily, reading each token before the next step; returns tokens and cache."""
    cache = network.make_cache(len(prompt) + steps)
    for _ in prefill(network, cache, prompt[:-1]):
        pass
    tokens = [prompt[-1]]
    for _ in range(steps):
        chosen = decode_step(network, cache, lambda logits: mx.argmax(logits, axis=-1), mx.array(tokens[-1:]))
        tokens.append(int(chosen.item()))
        cache.commit(1)
    return tokens[1:], cache


def committed_rows(cache: Any) -> list[mx.array]:
    """Return every layer's committed keys, then values: (1, Hkv, entries, D) each, without windows.

    Of a released block cache: its last rows.
    """
    if not isinstance(cache, PagedCache):
        return [array[:, :, : cache.committed] for array in cache.arrays]
    if not cache.committed:
        return cast(list[mx.array], vars(cache)["last_rows"])
    cache.slabs.settle()
    (table,) = cache.tables
    held = mx.concatenate([cache.slabs.store.block(0, block) for block in table], axis=3)  # (L, 2, Hkv, entries, D)
    return [layer[None, :, : cache.committed] for half in (0, 1) for layer in held[:, half]]


def committed(cache: Any) -> int:
    """Return the number of entries in `committed_rows`."""
    return cache.committed or vars(cache).get("last_committed", 0)


def same_rows(a: Any, b: Any) -> bool:
    """Return whether two caches have the same committed entries, bit for bit."""
    if committed(a) != committed(b):
        return False
    return all(bool(mx.array_equal(x, y)) for x, y in zip(committed_rows(a), committed_rows(b), strict=True))


def answer(network: Any, request: Request, context_limit: int = 256) -> tuple[list[int], Finished]:
    """Run a request to its end; returns (tokens, the closing event)."""
    return split(list(Engine(network, context_limit=context_limit).generate(request)))


def split(events: list[Event]) -> tuple[list[int], Finished]:
    """Split events into (tokens, the closing event), exactly one and last."""
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return [token for event in events if isinstance(event, Step) for token in event.tokens], last
