"""Running out of memory in the middle of work, said with figures.

MLX reports it as a RuntimeError of the device's own words (of Metal, when a command buffer fails; of its allocators,
when a buffer cannot be had), some time after the operation that asked for too much. On Metal it may end the process
instead: `mentioned_in` finds it in what such a process said last.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.units import format_bytes

_WORDS = re.compile(r"insufficient memory|out of memory|OutOfMemory|unable to allocate|maximum allowed buffer", re.I)
_ASKED = re.compile(r"allocate (\d{1,20}) bytes")
HINT = "use a shorter context (--context) or a smaller model, or close other programs"


def mentioned_in(text: str) -> bool:
    """Whether this is how a device, or MLX's allocator, says that memory ran out."""
    return _WORDS.search(text) is not None


def ran_out(error: Exception) -> bool:
    """Whether this is the device, or the host, saying so."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and mentioned_in(str(error)))


@contextmanager
def memory_errors(weight_bytes: int) -> Iterator[None]:
    """Turns a device's out-of-memory error within the block into NotEnoughMemoryError; all others pass.

    weight_bytes: of the model that is at work, for the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise NotEnoughMemoryError(_figures(str(error), weight_bytes), HINT) from error


def _figures(said: str, weight_bytes: int) -> str:
    import mlx.core as mx

    host = machine()
    held, peak = mx.get_active_memory(), mx.get_peak_memory()
    limit = host.device_memory_bytes or host.memory_bytes
    kind = {"metal": "a recommended working set", "cuda": "GPU memory", "cpu": "memory"}[host.backend]
    asked = _ASKED.search(said)
    return "".join(
        [
            f"memory ran out: {format_bytes(held)} in use, {format_bytes(peak)} at most",
            f" (weights {format_bytes(weight_bytes)})",
            f", {format_bytes(int(asked[1]))} more wanted" if asked else "",
            f", of {kind} of {format_bytes(limit)}" if limit else "",
        ]
    )
