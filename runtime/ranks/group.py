"""Collectives of the ranks that share a model, on MLX's distributed engine.

Contract: all ranks call the same collectives in the same order. Results are lazy, as of any operation. A collective
cannot be interrupted: `runtime.ranks.link` ends the process of a rank that waits for a lost one.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from headrace.runtime.errors import EngineError

JOIN_S = 8
_GUARD = 'sleep "$1"; kill -0 "$3" 2>&- && echo "headrace: $2" >&2 && kill -9 "$3"'


class Group:
    """The ranks of one model. raw: MLX's group; None for one rank alone, whose collectives are free."""

    def __init__(self, raw: mx.distributed.Group | None = None, device: mx.DeviceType = mx.DeviceType.cpu) -> None:
        self._raw = raw
        self.rank: int = 0 if raw is None else raw.rank()
        self.size: int = 1 if raw is None else raw.size()
        # Receiving blocks its stream until the sender sends, which may need this rank's own computation.
        self._receiving = None if raw is None else mx.new_stream(device)

    @classmethod
    def join(cls, backend: str = "ring", others: str = "the other ranks") -> "Group":
        """Connect to the other ranks, which MLX_RANK and MLX_HOSTFILE name. others: their names.

        Ends the process, with a line on standard error, if that takes more than JOIN_S. Raises EngineError.
        """
        try:
            with _ended_after(JOIN_S, f"{others} did not connect in {JOIN_S} s"):
                raw = mx.distributed.init(strict=True, backend=backend)
                return cls(raw, mx.DeviceType.gpu if backend == "nccl" else mx.DeviceType.cpu)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"the ranks cannot connect by {backend}: {error}") from error

    def all_sum(self, x: mx.array) -> mx.array:
        """Return the sum of all ranks' arrays, with the same bits on each."""
        return x if self._raw is None else mx.distributed.all_sum(x, group=self._raw)

    def all_gather(self, x: mx.array) -> mx.array:
        """Return all ranks' arrays (n, ...), one behind the other: (size * n, ...)."""
        return x if self._raw is None else mx.distributed.all_gather(x, group=self._raw)

    def send(self, x: mx.array, rank: int) -> mx.array:
        """Send to another rank once the result is evaluated, which is `x`."""
        return mx.distributed.send(x, rank, group=self._raw)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """Return what another rank sends."""
        return mx.distributed.recv(shape, dtype, rank, group=self._raw, stream=self._receiving)


@contextmanager
def _ended_after(seconds: int, line: str) -> Iterator[None]:
    """End this process unless the block ends in time: MLX connects with the interpreter lock held, so no thread can."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", str(seconds), line, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()
