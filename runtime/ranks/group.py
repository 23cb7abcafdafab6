"""Collectives of the ranks that share a model, on MLX's distributed engine.

Contract: all ranks call the same collectives in the same order. Results are lazy, as of any operation. A collective
cannot be interrupted: `runtime.ranks.peer_connection` ends the process of a rank that waits for a lost one.

MLX's ring sums in 2 (N - 1) messages, one after the other. Small arrays, and those of two ranks, are gathered and added
in the order of the ranks instead, in N - 1. Two ranks with the native kernels have a connection of their own.

Parts of networks call `all_sum`, `send` and so on within a pass (`models/network/tensor_decoder.py`,
`stage_decoder.py`); `models/loading/ranked.py` joins. Joining holds the interpreter lock, so no thread and no signal
handler of Python can end it: a shell process, signals' default actions and C's `_exit` do.
tests/runtime/ranks/test_group.py, test_join.py and test_peer.py guard this.
"""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import reduce
from operator import add

import mlx.core as mx

from headrace.runtime import ops
from headrace.runtime.errors import EngineError
from headrace.runtime.ops.native_plans import kernels
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.ranks.leader import listen
from headrace.runtime.ranks.peer_connection import Reception, connect

JOIN_S = 5  # that ranks get to connect
_MEET_S = 2.0  # that two ranks get for a connection of their own
_SMALL = 1 << 16  # bytes: a sum of at most so many takes as long as its messages' latency
_SUMMED = (mx.float32, mx.int32, mx.uint32)  # types that a peer adds
# A guard: after $1 seconds it prints $2 and hangs up process $3. Its standard input ends with the guarded process;
# then `cat` returns and `kill -9 0` ends the guard's whole process group, the sleeping part included.
_GUARD = '(sleep "$1"; printf "headrace: %s\\n" "$2" >&2; kill -HUP "$3") & cat; kill -9 0'
_HINT = "  hint: start again; a firewall may refuse MLX's ports, or another program connected to one"


class Group:
    """The ranks of one model.

    raw: MLX's group; None for one rank alone, whose collectives are free.
    device: that receives.
    gathers: sums are gathered where that takes fewer messages.
    peer: the connection to the only other rank, if any.
    """

    def __init__(
        self,
        raw: mx.distributed.Group | None = None,
        device: mx.DeviceType = mx.DeviceType.cpu,
        *,
        gathers: bool = False,
        peer: "kernels.Peer | None" = None,
    ) -> None:
        self._raw = raw
        self._gathers = gathers
        self._peer = peer
        self.rank = 0
        self.size = 1
        self._receiving: mx.Stream | None = None
        if raw is not None:
            self.rank = raw.rank()
            self.size = raw.size()
            # Receiving blocks its stream until the sender sends, which may need this rank's own computation.
            self._receiving = mx.new_stream(device)

    @property
    def raw(self) -> mx.distributed.Group | None:
        """MLX's group."""
        return self._raw

    @property
    def peer(self) -> "kernels.Peer | None":
        """The connection to the only other rank, if any."""
        return self._peer

    @classmethod
    def join(cls, address: str, backend: str = "ring", others: str = "the other ranks") -> "Group":
        """Connect to the other ranks, which MLX_RANK and MLX_HOSTFILE name.

        address: rank 0's.
        backend: of MLX's collectives.
        others: names of the other ranks, for the message.

        Ends the process, with a line on standard error, if that takes more than JOIN_S. Raises EngineError.
        """
        line = f"{others} did not connect in {JOIN_S} s\n{_HINT}"
        try:
            # The guard's SIGHUP needs its handler, so the guard begins last and is killed first.
            with _ended_by_signals(), _ended_by_hangup(), _ended_after(JOIN_S, line):
                raw = mx.distributed.init(strict=True, backend=backend)
                if backend == "ring":
                    return cls(raw, mx.DeviceType.cpu, gathers=True, peer=_peer(raw, address))
                device = mx.DeviceType.gpu if backend == "nccl" else mx.DeviceType.cpu
                return cls(raw, device)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"the ranks cannot connect by {backend}: {error}") from error

    def all_sum(self, x: mx.array) -> mx.array:
        """Return the sum of all ranks' arrays, with the same bits on each."""
        if self._raw is None:
            return x
        if self._peer is not None and x.dtype in _SUMMED:
            return self._peer.all_sum(x)
        if self._gathers and (self.size == 2 or x.nbytes <= _SMALL):
            # Each rank adds in the order of the ranks, so that rounding is the same.
            return reduce(add, mx.split(self.all_gather(x), self.size))
        return mx.distributed.all_sum(x, group=self._raw)

    def all_gather(self, x: mx.array) -> mx.array:
        """Return all ranks' arrays (n, ...), one after the other: (size * n, ...)."""
        if self._peer is not None:
            return self._peer.all_gather(x)
        if self._raw is None:
            return x
        return mx.distributed.all_gather(x, group=self._raw)

    def gather_columns(self, x: mx.array, columns: list[int]) -> mx.array:
        """Return all ranks' arrays (..., columns[rank]) side by side, on rank 0; the others evaluate the result."""
        if self._peer is not None:
            return self._peer.gather_columns(x, columns[1 - self.rank])
        # MLX gathers arrays of one shape, along the first axis: pad to the widest part, then cut.
        padding = [*[(0, 0)] * (x.ndim - 1), (0, max(columns) - x.shape[-1])]
        parts = mx.split(self.all_gather(mx.pad(x, padding)), self.size)
        return mx.concatenate([part[..., :width] for part, width in zip(parts, columns, strict=True)], axis=-1)

    def send(self, x: mx.array, rank: int) -> mx.array:
        """Send to another rank once the result is evaluated, which is `x`."""
        if self._peer is not None:
            return self._peer.send(x)
        return mx.distributed.send(x, rank, group=self._raw)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """Return what another rank sends."""
        if self._peer is not None and self._receiving is not None:
            return self._peer.receive(shape, dtype, self._receiving)
        return mx.distributed.recv(shape, dtype, rank, group=self._raw, stream=self._receiving)


def _peer(ring: mx.distributed.Group, address: str) -> "kernels.Peer | None":
    """Return a connection to the only other rank; None on both ranks without native kernels or a way to connect."""
    if ring.size() != 2 or not _all(ring, ops.select() is ops.native):
        return None
    # Either rank may have failed to connect. Both sum once more, and use the connection only if both have it.
    connection = None
    with suppress(OSError, EngineError):
        connection = _meet(ring, address)
    if not _all(ring, connection is not None) or connection is None:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return kernels.Peer(connection.detach(), ring.rank())


def _meet(ring: mx.distributed.Group, address: str) -> socket.socket | None:
    """Connect the two ranks, with a key that rank 0 sends over the ring.

    Raises OSError or RankLostError; returns None if rank 0 cannot listen.
    """
    message = [0] * 33  # a port and a key of 32 bytes; rank 1 adds zeros, and a port of 0 stands for none
    listener = None
    if ring.rank() == 0:
        with suppress(OSError):
            listener = listen(address)
            message = [listener.getsockname()[1], *secrets.token_bytes(32)]
    port, *key = read_ints(_sum(ring, message))  # rank 0 listens by now
    if listener is None:
        if not port:
            return None
        return connect((address, port), ring.rank(), bytes(key), _MEET_S)
    with closing(Reception(listener, bytes(key))) as reception:
        accepted = reception.take(_MEET_S)
    if accepted is None:
        return None
    _, connection = accepted
    return connection


def _all(ring: mx.distributed.Group, flag: bool) -> bool:
    """Return whether the flag is set on every rank."""
    return _sum(ring, [int(flag)]).item() == ring.size()


def _sum(ring: mx.distributed.Group, numbers: list[int]) -> mx.array:
    return mx.distributed.all_sum(mx.array(numbers, mx.uint32), group=ring)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end this process at once: handlers in Python would wait for the interpreter lock."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    python = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in python:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in python.items():
            signal.signal(number, handler)


@contextmanager
def _ended_by_hangup() -> Iterator[None]:
    """Have SIGHUP end this process at once with exit code 1, its number, by a handler that is C's `_exit`."""
    libc = ctypes.CDLL(None)
    # C's `signal(number, handler)`: a handler gets the signal's number, which `_exit` takes as its exit code.
    handle = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("signal", libc))
    before = handle(signal.SIGHUP, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        handle(signal.SIGHUP, before)
        signal.siginterrupt(signal.SIGHUP, True)  # as Python has it


@contextmanager
def _ended_after(seconds: int, line: str) -> Iterator[None]:
    """Have SIGHUP end this process unless the block ends in time: MLX holds the interpreter lock, so no thread can."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", str(seconds), line, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()
