"""The device's memory while an engine works: wired for one sequence, and given back to the system at the end.

Batches free and make buffers all the time, which is unsafe with wired memory (`runtime.machine.memory`). So memory is
wired for one sequence alone.

`Engine` begins work in each step, and ends it when no sequence is left. Guards: tests/runtime/engine/test_engine.py and
test_many_sequences.py.
"""

from contextlib import ExitStack

import mlx.core as mx

from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.machine.memory import wired


class WorkMemory:
    """Wires memory during work, and frees it after.

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
        """Wire memory at the beginning of work; unwire it for good once there are several sequences.

        Each step may call it.
        """
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
            # the rest of the step that was built ahead: wait for that one without the lock first (docs/workarounds.md).
            mx.synchronize()
            self._kv.trim()
            mx.clear_cache()
