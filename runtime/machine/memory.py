"""How much memory weights and KV cache may take on this machine, and the one place that pins them there.

A budget is what is free now, less a reserve for everything else that runs. Linux: available RAM, or the
container's limit where that is tighter. CUDA: the card's free memory. Metal: the recommended working set, which
macOS already keeps below the RAM; free RAM is no measure there, since macOS makes room by compressing others.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.runtime.config import environment
from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.machine.hardware import Machine, machine, memory_available
from headrace.runtime.metrics.units import format_bytes

# Bytes of freed buffers that MLX may keep for the next operations: enough for those of a prefill chunk to go round.
POOL = 512 << 20
READING = 8 << 20  # the same while weights are read: a layer's, but never a whole embedding table beside its copy
_RESERVE_SHARE = 0.05
_RESERVE_LEAST = 256 << 20
# Pinned memory is linked to kernel panics on macOS (mlx issue 3186, mlx-lm issue 883), so it is pinned only where the
# system might otherwise page weights out in the middle of an answer, and never all that could be.
_WIRED_FROM = 0.5  # of the working set: smaller weights stay resident by themselves
_WIRED_SHARE = 0.75


@dataclass(frozen=True)
class Budget:
    """Bytes that weights, KV cache and working memory may take together, and where that number comes from."""

    total: int
    """What the machine has for this: RAM or container limit, card, recommended working set."""
    free: int
    """What of it is free now."""
    reserve: int
    """Left to everything else."""
    source: str
    """`available RAM`, `free GPU memory` or `recommended working set`."""

    @property
    def usable(self) -> int:
        return max(0, self.free - self.reserve)


def budget(host: Machine | None = None, available: Callable[[], int | None] = memory_available) -> Budget | None:
    """The budget of this machine now; None where the machine does not say how much memory it has."""
    host = host or machine()
    if host.backend == "metal" and host.device_memory_bytes:
        total, source = host.device_memory_bytes, "recommended working set"
        free = max(0, total - _held_by_mlx())
    elif host.backend == "cuda" and host.device_memory_bytes:
        total, free, source = host.device_memory_bytes, _free_on_card(host.device_memory_bytes), "free GPU memory"
    else:
        free_ram = available()
        if free_ram is None:
            return None
        total, free, source = host.memory_bytes or free_ram, free_ram, "available RAM"
    return Budget(total, free, max(_RESERVE_LEAST, int(total * _RESERVE_SHARE)), source)


def check_fits(
    weight_bytes: int,
    kv_bytes: int,
    overhead_bytes: int,
    limit: Budget | None,
    context: int | None = None,
    *,
    fitting: int = 0,
) -> None:
    """Refuse what cannot fit, before anything is loaded. An unknown budget refuses nothing.

    `kv_bytes` is the KV cache at `context` tokens, `fitting` the longest context that would fit (0: not known), for the
    hint, `overhead_bytes` activations and scratch. Raises NotEnoughMemoryError with the numbers.
    """
    needed = weight_bytes + kv_bytes + overhead_bytes
    if limit is None or needed <= limit.usable:
        return
    asked = f"KV cache for {context:,} tokens" if context else "KV cache"
    raise NotEnoughMemoryError(
        f"not enough memory: needs {format_bytes(needed)} (weights {format_bytes(weight_bytes)}, "
        f"{asked} {format_bytes(kv_bytes)}, working memory {format_bytes(overhead_bytes)}), "
        f"but {format_bytes(limit.usable)} may be used "
        f"({limit.source} {format_bytes(limit.free)} less {format_bytes(limit.reserve)} reserve)",
        _what_would_fit(limit.usable - weight_bytes - overhead_bytes, fitting),
    )


@contextmanager
def reading_weights() -> Iterator[None]:
    """While weights are read and prepared: what has been copied goes back to the system, not into MLX's pool.

    So it does at the end with what the allocator kept in pieces, which would come on top of the first answer's peak.
    """
    import mlx.core as mx

    before = mx.set_cache_limit(READING)
    try:
        yield
        mx.clear_cache()
    finally:
        mx.set_cache_limit(before)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc
    if trim is not None:
        trim(0)


@contextmanager
def wired(weight_bytes: int, kv_bytes: int, host: Machine | None = None) -> Iterator[int]:
    """Pin weights and K/V to memory on a Mac's GPU while the block runs; gives the limit set, 0 where nothing is.

    Only weights above half of the recommended working set are, with what comes to them never above three quarters of
    it, and not with HEADRACE_WIRED=0. Works from macOS 15.
    """
    limit = _wired_limit(weight_bytes, kv_bytes, host or machine())
    if not limit:
        yield 0
        return
    import mlx.core as mx

    before = mx.set_wired_limit(limit)
    try:
        yield limit
    finally:
        mx.set_wired_limit(before)


def _wired_limit(weight_bytes: int, kv_bytes: int, host: Machine) -> int:
    working_set = host.device_memory_bytes
    if host.backend != "metal" or not working_set or not environment.wired():
        return 0
    if weight_bytes <= working_set * _WIRED_FROM:
        return 0
    return min(weight_bytes + kv_bytes, int(working_set * _WIRED_SHARE))


def _what_would_fit(room: int, fitting: int) -> str:
    if room <= 0:
        return "the weights alone are too large: choose a smaller model or fewer bits, or close other programs"
    if fitting:
        return f"a context of up to {fitting:,} tokens would fit"
    return f"{format_bytes(room)} would be left for the KV cache: choose a shorter context or a smaller model"


def _held_by_mlx() -> int:
    """Bytes this process already holds on the device: another model, its cache."""
    import mlx.core as mx

    return int(mx.get_active_memory())


def _free_on_card(total: int) -> int:
    """Free memory of the GPU, all processes counted (MLX asks NVML)."""
    import mlx.core as mx

    free = mx.device_info(mx.gpu).get("free_memory")
    return free if isinstance(free, int) else total
