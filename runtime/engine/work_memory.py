"""The device's memory while the engine works, and after.

For one sequence alone, memory is wired: batches free and make buffers all the time. At the end of work, working memory
goes back to the system.
"""

from contextlib import ExitStack

import mlx.core as mx

from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.machine.memory import wired


class WorkMemory:
    """Memory of one engine. weight_bytes, kv_bytes: those of a sequence alone, to wire."""

    def __init__(self, kv: KVBackend, weight_bytes: int, kv_bytes: int) -> None:
        self._kv = kv
        self._weight_bytes = weight_bytes
        self._kv_bytes = kv_bytes
        self._held: ExitStack | None = None  # during work

    @property
    def is_held(self) -> bool:
        """True between `hold` and `free`."""
        return self._held is not None

    def hold(self, sequences: int) -> None:
        """Hold memory for work on so many sequences."""
        if self._held is None:
            mx.reset_peak_memory()
            self._held = ExitStack()
            self._held.enter_context(wired(self._weight_bytes, self._kv_bytes))
        if sequences > 1:
            self._held.pop_all().close()

    def free(self) -> None:
        """Free memory at the end of work, if it is held. Raises what the device's last work raised."""
        if self._held is None:
            return
        with self._held:
            self._held = None
            # clear_cache waits for the device with the interpreter lock held, which would stop every other thread for
            # the rest of the step that was built ahead: wait for that one without the lock first.
            mx.synchronize()
            self._kv.trim()
            mx.clear_cache()
