"""A network under observation: the real one, with a record of what the engine asked of it."""

from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

import mlx.core as mx

from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Finished, Request, Step
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.buffers import BufferBackend
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.kv.paged import BlockTable
from headrace.runtime.network import Network
from headrace.runtime.ops import Projections
from tests.support.alone import Alone, new_cache, prefill


class WatchedNetwork:
    """Delegates to `network`; remembers fed tokens, cache positions, logits and the caches it made.

    `on_pass(n)` is called before the n-th forward pass (from 0) and may raise. With `forgets=True` its caches come back
    to their marks only, like recurrent state.
    """

    def __init__(
        self, network: Network, *, on_pass: Callable[[int], None] = lambda _: None, forgets: bool = False
    ) -> None:
        self._network = network
        self._on_pass = on_pass
        self._forgets = forgets
        self.joins = True  # False: every sequence has passes of its own
        self.caches: list[Any] = []
        self.fed: list[mx.array] = []  # (1, T) per pass
        self.positions: list[tuple[int, int]] = []  # (length, committed) before each pass of one sequence
        self.attended: list[tuple[int, int]] = []  # (layer, T) of every attend call
        self.logits_seen: list[mx.array] = []  # (rows, V) per step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def kv_backend(self, options: KVOptions) -> KVBackend:
        """Its caches and passes are watched. Caches that forget are in buffers that nobody shares."""
        if self._forgets:
            network: Any = self._network
            return cast(KVBackend, _WatchedBackend(self, _Forgetting(network.kv_shape, network.ops, options)))
        return cast(KVBackend, _WatchedBackend(self, self._network.kv_backend(options)))

    def watch(self, cache: Any) -> Any:
        """Watch a new cache."""
        if isinstance(cache, BlockTable):
            _remember(cache)
        self.caches.append(cache)
        return cache

    def embed(self, tokens: mx.array) -> mx.array:
        self._on_pass(len(self.fed))
        self.fed.append(tokens)
        return self._network.embed(tokens)

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        if len(kv.rows) == 1:
            cache = kv.rows[0].cache
            self.positions.append((cache.length, cache.committed))
        return self._network.layers(x, kv)

    def logits(self, x: mx.array) -> mx.array:
        logits = self._network.logits(x)
        self.logits_seen.append(logits)
        return logits


class _WatchedBackend:
    def __init__(self, watched: WatchedNetwork, backend: KVBackend) -> None:
        self._watched = watched
        self._backend = backend
        self._known: list[Any] = []  # weak references: a kept cache comes back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def acquire(self, prompt: Sequence[int], entries: int = 0) -> Any:
        cache = self._backend.acquire(prompt, entries)
        if not any(known() is cache for known in self._known):
            self._known.append(ref(cache))
            self._watched.watch(cache)
        return cache

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        groups = [rows] if self._watched.joins else [[row] for row in rows]
        passes = [kv_pass for group in groups for kv_pass in self._backend.make_passes(group)]
        return [cast(KVPass, _CountedPass(self._watched, kv_pass)) for kv_pass in passes]


class _CountedPass:
    def __init__(self, watched: WatchedNetwork, kv_pass: KVPass) -> None:
        self._watched = watched
        self._pass = kv_pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pass, name)

    def attend(self, layer: int, qkv: Projections, spec: Any) -> mx.array:
        self._watched.attended.append((layer, qkv[0].shape[1]))
        return self._pass.attend(layer, qkv, spec)


class _Forgetting(BufferBackend):
    """Its caches come back to their marks only."""

    def __init__(self, shape: Any, ops: Any, options: KVOptions) -> None:
        super().__init__(shape, ops, options, alone=True)

    def new_cache(self) -> Any:
        cache = super().new_cache()
        _forget(cache)
        return cache


def _remember(cache: Any) -> None:
    """Let `committed_rows` still have what a cache held when it was given back."""
    close = cache.close

    def closing() -> None:
        if cache.committed and len(cache.tables) == 1:  # with windows nobody asks for them
            cache.last_rows, cache.last_committed = committed_rows(cache), cache.committed
            mx.eval(cache.last_rows)
        close()

    cache.close = closing


def _forget(cache: Any) -> None:
    """Let a cache come back to where it was marked, and nowhere else."""
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

    cache.needs_marks = True
    cache.mark = mark
    cache.reachable = reachable
    cache.trim = back
    cache.rollback = refuse


def step_by_step(network: Any, prompt: Sequence[int], steps: int) -> tuple[list[int], Any]:
    """Greedy tokens where every one is read before the next step is built, and the cache: decode without overlap."""
    cache = new_cache(network, len(prompt) + steps)
    for _ in prefill(network, cache, prompt[:-1]):
        pass
    tokens = [prompt[-1]]
    for _ in range(steps):
        chosen = decode_step(
            network, cache.reserve(1, "decode"), lambda logits: mx.argmax(logits, axis=-1), mx.array(tokens[-1:])
        )
        tokens.append(int(chosen.item()))
        cache.commit(1)
    return tokens[1:], cache


def committed_rows(cache: Any) -> list[mx.array]:
    """The committed part of every layer's keys, then of their values: (1, Hkv, entries, D) each, without windows.

    Of a cache in blocks that was given back: what it held then.
    """
    if isinstance(cache, Alone):
        cache = cache.cache
    if not isinstance(cache, BlockTable):
        return [array[:, :, : cache.committed] for array in cache.arrays]
    if not cache.committed:
        return cast(list[mx.array], vars(cache)["last_rows"])
    cache.pool.storage.settle()
    (table,) = cache.tables
    held = mx.concatenate(
        [cache.pool.storage.store.block(0, block) for block in table], axis=3
    )  # (L, 2, Hkv, entries, D)
    return [layer[None, :, : cache.committed] for half in (0, 1) for layer in held[:, half]]


def committed(cache: Any) -> int:
    """Return the number of entries of `committed_rows`."""
    return cache.committed or vars(cache).get("last_committed", 0)


def same_rows(a: Any, b: Any) -> bool:
    """Return True if two caches hold the same committed entries, bit for bit."""
    if committed(a) != committed(b):
        return False
    return all(bool(mx.array_equal(x, y)) for x, y in zip(committed_rows(a), committed_rows(b), strict=True))


def answer(network: Any, request: Request, context_limit: int = 256) -> tuple[list[int], Finished]:
    """Run a request to its end: (tokens, the closing event)."""
    return split(list(Engine(network, context_limit=context_limit).generate(request)))


def split(events: list[Event]) -> tuple[list[int], Finished]:
    """Events -> (tokens, the closing event). There must be exactly one, at the end."""
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return [token for event in events if isinstance(event, Step) for token in event.tokens], last
