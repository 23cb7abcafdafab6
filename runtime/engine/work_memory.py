"""The device's memory while the engine works, and after.

For one sequence alone, memory is wired: batches free and make buffers all the time. At the end of work, working memory
goes back to the system.
"""

from contextlib import ExitStack

import mlx.core as mx

from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.machine.memory import wired


class WorkMemory:
    """Memory of one engine.

    weight_bytes, kv_bytes: of the network and of one sequence with a full context, to wire.
    """

    def __init__(self, kv: KVBackend, weight_bytes: int, kv_bytes: int) -> None:
        self._kv = kv
        self._weight_bytes = weight_bytes
        self._kv_bytes = kv_bytes
        self._wired: ExitStack | None = None  # during work; empty as soon as there are several sequences

    @property
    def is_working(self) -> bool:
        """True between `begin_work` and `end_work`."""
        return self._wired is not None

    def begin_work(self, num_sequences: int) -> None:
        """Wire memory for work on one sequence; unwire it for several. Each step may call it."""
        if self._wired is None:
            mx.reset_peak_memory()
            self._wired = ExitStack()
            self._wired.enter_context(wired(self._weight_bytes, self._kv_bytes))
        if num_sequences > 1:
            self._wired.pop_all().close()

    def end_work(self) -> None:
        """Free memory at the end of work, if there was any. Raises what the device's last work raised."""
        if self._wired is None:
            return
        with self._wired:
            self._wired = None
            # clear_cache waits for the device with the interpreter lock held, which would stop every other thread for
            # the rest of the step that was built ahead: wait for that one without the lock first.
            mx.synchronize()
            self._kv.trim()
            mx.clear_cache()
