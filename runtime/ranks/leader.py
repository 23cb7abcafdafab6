"""Rank 0 of several: the control channel to the followers, and the network and K/V backend whose calls they repeat.

Contract: every call that changes K/V state is logged in the order in which it is done, and the log is sent before a
pass is run. A follower repeats the calls on its own part of the model, so block tables, prefixes and recurrent states
are the same.

    LeaderNetwork.kv_backend -> LeaderBackend -> LeaderCache    each logs, then calls the rank's own object
    Leader.log, flush, ask -> PeerConnection -> `_Repeated` (runtime/ranks/follower.py): a method for each call

A new call is added in both files. To the engine all of this looks like one machine (`runtime.network`).

Guards: tests/models/network/test_ranks.py, which compares answers with those of one rank, and
tests/runtime/ranks/test_peer_connection.py.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import mlx.core as mx
from msgspec.structs import replace

from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.metrics.telemetry import RankTimes, StepParts, rank_times
from headrace.runtime.network import Network
from headrace.runtime.ranks.pass_limit import PassLimit
from headrace.runtime.ranks.peer_connection import FAILED, SILENCE_S, PeerConnection, RankLostError, Reception, Record
from headrace.runtime.ranks.split import divided

PASS_ROWS = 4  # of a pipeline's pass, at least: fewer rows take nearly as long, since each pass reads all weights
END_S = 2.0  # that followers get to end by themselves
_DOUBT_S = 0.5  # after a rank's error, for news of a lost one that may have caused it


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket for `Leader` that listens on one address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class Leader:
    """The followers, as rank 0 sees them.

    listener, key: see `Reception`.
    names: of all ranks, for errors.
    on_lost: called on a thread when a rank is lost; then the process ends, since a collective cannot be interrupted.
    end: ends the process with an exit code.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        names: Sequence[str],
        on_lost: Callable[[RankLostError], None],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._reception = Reception(listener, key)
        self._end = end
        self._on_lost = on_lost
        self.names = list(names)
        self.limit = PassLimit()
        self.address = str(listener.getsockname()[0])
        self._links: dict[int, PeerConnection] = {}  # by rank; `accept` adds, `close` clears
        self._losing = threading.Lock()  # taken once, by the thread that ends all ranks, and never released
        self._lost = threading.Event()
        # Calls that are not sent yet: name, then arguments. The engine's thread alone appends and sends, so the log
        # needs no lock, and its order is that of the calls.
        self._log: list[list[object]] = []
        self.out_of_step = False  # a pass was left in the middle: the followers wait in it for good
        self.passes = 1  # of the newest step
        self.pending: mx.array | KVPass | None = mx.zeros(())  # what the newest pass evaluates; None: not built yet

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    def accept(self, timeout: float) -> None:
        """Wait for all followers. Raises RankLostError that names a missing one."""
        until = time.monotonic() + timeout
        while len(self._links) < self.size - 1:
            accepted = self._reception.take(until - time.monotonic())
            if accepted is None:
                missing = [name for rank, name in enumerate(self.names) if rank and rank not in self._links]
                raise RankLostError(f"{missing[0]} has not connected in {timeout:.0f} s")
            rank, connection = accepted
            if not 0 < rank < self.size or rank in self._links:
                connection.close()
                continue
            self._links[rank] = PeerConnection(connection, self.names[rank], partial(self.lose, rank))
            self._links[rank].start()
        # All followers are here: a later connection is a stranger's.
        self._reception.close()
        self.limit.watch(self._lost, partial(self.lose, None))

    def tell(self, record: Record) -> None:
        """Send a record to every follower."""
        for link in self._links.values():
            link.send(record)

    def answers(self, timeout: float | None) -> list[Record]:
        """Return one record of every follower, in order. Raises RankLostError that names one without."""
        answers = []
        for rank, link in sorted(self._links.items()):
            answer = link.take(timeout)
            if answer is None:
                self._lost.wait(SILENCE_S)  # its loss ends this process, with the reason
                raise RankLostError(f"{self.names[rank]} has closed the connection")
            answers.append(answer)
        return answers

    def log(self, *call: object) -> None:
        """Append a call for the followers."""
        self._log.append(list(call))

    def flush(self) -> None:
        """Send the log. Raises EngineError after a pass that was left in the middle."""
        if self.out_of_step:
            raise EngineError("several ranks: a pass was interrupted; start again")
        calls = self._log
        self._log = []
        if calls:
            self.tell({"calls": calls})

    def ask(self) -> list[Record]:
        """Send the log and return every follower's answer to its last call."""
        self.flush()
        return self.answers(None)

    def kernel_seconds(self) -> list[float | None]:
        """Return the seconds in each follower's kernels of a recent decode pass; None before one is known."""
        return [link.times for _, link in sorted(self._links.items())]

    def lose(self, rank: int | None, reason: str) -> None:
        """End all ranks because of one; None: one of the others.

        Called on the threads of connections and of `limit`, and on the engine's if a send fails.
        """
        if reason.startswith(FAILED):
            self._lost.wait(_DOUBT_S)  # another rank may be gone, which its neighbours notice, too
        if not self._losing.acquire(blocking=False):
            return  # another thread ends the process
        name = " or ".join(self.names[1:])
        if rank is not None:
            name = self.names[rank]
        error = RankLostError(f"{name} {reason}", "every rank has ended; start again, or without it", rank)
        for other, link in list(self._links.items()):  # a copy: `accept` may still add some
            if other != rank:
                # The others end, too, which is no loss of its own. Each send has a thread, as it may wait for a peer
                # that takes nothing.
                link.expect_end()
                threading.Thread(target=link.send, args=({"end": str(error)},), daemon=True).start()
        with suppress(Exception):
            self._on_lost(error)
        self._lost.set()  # after the report: `answers` waits for it, and would raise an error without the reason
        self._end(1)

    def close(self) -> None:
        """End the followers, after what they still compute."""
        self._reception.close()
        for link in self._links.values():
            link.expect_end()  # before the record, which the follower answers by closing the connection
            link.send({"end": ""})
        # A loop of its own, so that the followers end at the same time.
        for link in self._links.values():
            link.wait_closed(END_S)
            link.close()
        self._links.clear()


class LeaderNetwork:
    """A network of one rank's part, whose passes the followers repeat. All else is the network's own.

    network: of this rank's part.
    leader: sends passes to the followers.
    kv_memory: bytes of this rank's K/V for which every rank has memory.
    staged: the ranks are a pipeline.
    """

    def __init__(self, network: Network, leader: Leader, kv_memory: int, *, staged: bool) -> None:
        self._network = network
        self._leader = leader
        self.staged = staged
        self.takes_turns = staged and network.pages
        self.kv_memory = kv_memory
        self.waiting = leader.limit.waiting

    def __getattr__(self, name: str) -> Any:
        if name.startswith("with_"):
            raise UsageError(
                "a changed copy of a network, such as a profile's, runs on one machine only",
                "start it without --hosts",
            )
        return getattr(self._network, name)

    @property
    def division(self) -> "LeaderNetwork":
        return self

    def rank_times(self, parts: StepParts, step_s: float) -> tuple[RankTimes, ...]:
        kernels_s = [parts.weights_s + parts.kv_s + parts.sampling_s]
        for seconds in self._leader.kernel_seconds():
            if seconds is None:
                return ()
            kernels_s.append(seconds)
        in_turn = self.staged and self._leader.passes == 1
        return rank_times(step_s, kernels_s, in_turn)

    def kv_backend(self, options: KVOptions) -> "KVBackend":
        """Return the network's backend, whose calls the followers repeat."""
        self._leader.log("backend", options.limit, options.max_running, options.keep_prefix)
        backend = self._network.kv_backend(options)
        with self.waiting():
            answers = self._leader.ask()
        marks = any([*(answer["marks"] for answer in answers), backend.acquire(()).needs_marks])
        parts = self._leader.size if self.takes_turns else 1
        return LeaderBackend(backend, self._leader, marks, parts)

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        # Sent before the pass is built and run: its collectives wait for the followers, which wait for this record.
        self._leader.log("run")
        self._leader.flush()
        self._leader.pending = kv
        if any(row.logits for row in kv.rows):
            self._leader.pending = None  # until `logits`
        return self._network.layers(x, kv)

    def logits(self, x: mx.array) -> mx.array:
        """See `Network`. Raises EngineError for a pass whose rows want none: the followers would not take part."""
        if self._leader.pending is not None:
            raise EngineError("several ranks: logits of a pass that was made without")
        logits = self._network.logits(x)
        self._leader.pending = logits
        return logits


class LeaderBackend:
    """A K/V backend whose calls the followers repeat; K/V of several ranks are not kept on disk.

    backend: of this rank's part.
    marks: a rank's caches need marks; those of all ranks go back alike.
    parts: passes of a step with as many rows, so that each rank of a pipeline has one to compute.
    """

    def __init__(self, backend: KVBackend, leader: Leader, marks: bool, parts: int = 1) -> None:
        self._backend = backend
        self._leader = leader
        self._marks = marks
        self._parts = parts
        self._made = 0  # caches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def acquire(self, prompt: Sequence[int], entries: int = 0) -> KVCache:
        """See `KVBackend`. Ranks of other layers or less memory may have a shorter prefix: all take the shortest."""
        end = len(prompt)
        while True:
            self._made += 1
            self._leader.log("acquire", self._made, list(prompt), end, entries, self._marks)
            inner = self._backend.acquire(prompt[:end], entries)
            inner.needs_marks = self._marks
            made = LeaderCache(inner, self._made, self._leader, list(prompt))
            with self._leader.limit.waiting():
                answers = self._leader.ask()
            lengths = {inner.committed, *(answer["found"] for answer in answers)}
            if len(lengths) == 1:
                return cast(KVCache, made)  # it has what it lacks from `inner`
            made.close()  # on the followers, too
            end = min(lengths) + 1  # a cache has at most all tokens but the last

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, LeaderCache)
        self._leader.log("release", cache.number, cache.newer(tokens))
        self._backend.release(cache.inner, tokens)

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        """See `KVBackend`. A pipeline gets several passes of about as many rows, which its stages compute in turn."""
        parts = max(1, min(self._parts, len(rows) // PASS_ROWS))
        groups = [[rows[i] for i in indices] for indices in divided(len(rows), [1] * parts)]
        self._leader.limit.made(rows)
        # Logged before they are made: followers repeat a call that fails for a full pool, too.
        self._leader.log("passes", [[_row_arguments(row) for row in group] for group in groups])
        inner = [[replace(row, cache=cache_of(row).inner) for row in group] for group in groups]
        passes = [kv_pass for group in inner for kv_pass in self._backend.make_passes(group)]
        self._leader.passes = len(passes)
        return passes

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        assert isinstance(cache, LeaderCache)
        self._leader.log("on_prefill", cache.number, cache.newer(tokens))
        self._backend.on_prefill(cache.inner, tokens)

    def evict(self) -> None:
        self._leader.log("evict")
        self._backend.evict()

    def trim(self) -> None:
        self._leader.log("trim")
        self._leader.flush()
        self._backend.trim()

    def clear(self) -> None:
        """Drop everything after an error.

        If the followers wait in a collective, they take no call any more: that is noted, and the next pass is refused.
        """
        pending = self._leader.pending
        if pending is None:
            self._leader.out_of_step = True  # the followers wait in collectives that no rank 0 will call
            return
        # Followers have handed the newest pass to their devices. Its collectives wait for this rank's part, which may
        # have failed.
        with suppress(RuntimeError), self._leader.limit.waiting():
            if isinstance(pending, mx.array):
                mx.eval(pending)
            else:
                mx.eval(pending.arrays)
        self._leader.log("clear")
        self._leader.flush()
        self._leader.answers(SILENCE_S)  # a collective fails before the control channel knows of a lost rank
        self._backend.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        pass

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        pass


def cache_of(row: PassRow) -> "LeaderCache":
    """Return the cache of a row of rank 0."""
    assert isinstance(row.cache, LeaderCache)
    return row.cache


def _row_arguments(row: PassRow) -> list[object]:
    """Return a row as `_Repeated.passes` takes it: number and length of its cache, then the fields of `PassRow`."""
    cache = cache_of(row)
    return [cache.number, cache.inner.length, row.count, row.phase, row.output, row.logits, row.hidden]


class LeaderCache:
    """A cache whose calls the followers repeat.

    inner: the cache of this rank.
    number: its number among those that the followers have.
    tokens: those that the followers know.
    path: names before each call, such as "head" for the caches of a prediction head.
    """

    def __init__(
        self, inner: KVCache, number: int, leader: Leader, tokens: list[int], path: tuple[str, ...] = ()
    ) -> None:
        self.inner = inner
        self.number = number
        self.tokens = tokens
        self._leader = leader
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def newer(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the followers do not know yet."""
        new = list(tokens[len(self.tokens) :])
        self.tokens += new
        return new

    def commit(self, tokens: int) -> None:
        self._leader.log(*self._path, "commit", self.number, tokens)
        self.inner.commit(tokens)

    def rollback(self) -> None:
        self._leader.log(*self._path, "rollback", self.number)
        self.inner.rollback()

    def close(self) -> None:
        self._leader.log(*self._path, "close", self.number)
        self.inner.close()
