"""Out-of-memory errors of devices, as NotEnoughMemoryError with figures, and timeouts of GPUs, as EngineError.

MLX raises RuntimeError with the device's message (Metal: a failed command buffer; allocators: a refused buffer), some
time after the operation at fault. Metal may end the process instead; its last output then has the message.

Each step of the engine runs within `memory_errors`. Messages are those of MLX 0.32 and of macOS;
tests/runtime/machine/test_out_of_memory.py has them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.runtime.errors import EngineError, NotEnoughMemoryError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.units import format_bytes

# [metal::malloc] Attempting to allocate 17179869184 bytes which is greater than the maximum allowed buffer size ...
_WORDS = re.compile(r"insufficient memory|out of memory|OutOfMemory|unable to allocate|maximum allowed buffer", re.I)
_ASKED = re.compile(r"allocate (\d{1,20}) bytes")  # [malloc] Unable to allocate 21474836480 bytes.
_TIMEOUT = re.compile(r"ErrorTimeout|Caused GPU Timeout|ImpactingInteractivity|Impacting Interactivity")  # of Metal
HINT = "use a shorter context (--context) or a smaller model, or close other programs"
METAL_HINT = f"{HINT}; sysctl iogpu.wired_limit_mb raises the GPU's share (docs/mac.md)"
_TIMEOUT_HINT = "close other programs that use the GPU, or use a smaller model or a shorter context"


def reports_out_of_memory(text: str) -> bool:
    """Return whether a message is an out-of-memory error of a device or of MLX's allocator."""
    return _WORDS.search(text) is not None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether this is an out-of-memory error of the device or the host."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and reports_out_of_memory(str(error)))


@contextmanager
def memory_errors(weight_bytes: int) -> Iterator[None]:
    """Convert out-of-memory errors of the block into NotEnoughMemoryError, and timeouts into EngineError.

    weight_bytes: for the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            hint = METAL_HINT if machine().backend == "metal" else HINT
            raise NotEnoughMemoryError(_figures(str(error), weight_bytes), hint) from error
        if _TIMEOUT.search(str(error)):
            raise EngineError("the system ended a computation that kept the GPU too long", _TIMEOUT_HINT) from error
        raise


def _figures(message: str, weight_bytes: int) -> str:
    """Return the error's text: memory in use, weights, the request that failed if MLX names it, and the limit."""
    import mlx.core as mx

    host = machine()
    active = mx.get_active_memory()
    peak = mx.get_peak_memory()
    limit = host.device_memory_bytes or host.memory_bytes
    kind = {"metal": "a recommended working set", "cuda": "GPU memory", "cpu": "memory"}[host.backend]
    asked = _ASKED.search(message)
    text = f"memory ran out: {format_bytes(active)} in use, {format_bytes(peak)} at most"
    text += f" (weights {format_bytes(weight_bytes)})"
    if asked:
        text += f", {format_bytes(int(asked[1]))} more wanted"
    if limit:
        text += f", of {kind} of {format_bytes(limit)}"
    return text
