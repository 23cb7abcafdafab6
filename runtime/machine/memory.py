"""Memory budget of weights and KV cache, and wiring of memory on Macs.

The budget is the free memory less a reserve for other programs. Linux: available RAM, or the limit of the container
or of the address space if lower. CUDA: the card's free memory. Metal: the recommended working set; free RAM says little
there, since macOS compresses the memory of others.

Loading refuses by `check_fits` before any weight is read; `KVBudget` takes the rest for K/V. The limits on wiring and
on moving buffers are for kernel panics of macOS, which no test can show: docs/workarounds.md has the reports.

Guard: tests/runtime/machine/test_memory.py.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from headrace.runtime.config import environment
from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.machine.address_space import address_space, threads_need, too_small
from headrace.runtime.machine.hardware import Machine, machine, memory_available
from headrace.runtime.metrics.units import format_bytes

CACHE_LIMIT = 512 << 20  # bytes of freed buffers that MLX keeps: enough for a prefill chunk
LOADING_CACHE_LIMIT = 8 << 20  # the same while weights are loaded: a layer, but never a whole embedding table
_RESERVE_SHARE = 0.05  # of the total, left to other programs
_RESERVE_LEAST = 256 << 20  # the same in bytes, at least
_ADDRESS_SPACE = "address space (ulimit -v)"
# Wired memory is linked to kernel panics on macOS (docs/workarounds.md). Only weights that might be paged
# out during an answer are wired, and never the whole working set.
_WIRED_FROM = 0.5  # share of the working set; smaller weights stay resident anyway
_WIRED_SHARE = 0.75  # of the working set, at most


class MemoryBudget(Struct, frozen=True):
    """Bytes for weights, KV cache and working memory together."""

    total: int
    """RAM or container limit, address space limit, GPU memory, or recommended working set."""
    free: int
    reserve: int
    """Left to other programs, or to the threads of the process in its address space."""
    source: str
    """`available RAM`, `address space (ulimit -v)`, `free GPU memory` or `recommended working set`."""

    @property
    def usable(self) -> int:
        return max(0, self.free - self.reserve)

    @property
    def is_address_space(self) -> bool:
        return self.source == _ADDRESS_SPACE


def budget(
    host: Machine | None = None,
    available: Callable[[], int | None] = memory_available,
    limited: Callable[[], tuple[int, int] | None] = address_space,
) -> MemoryBudget | None:
    """Return the current budget of this machine; None if its memory is unknown."""
    host = host or machine()
    if host.backend == "metal" and host.device_memory_bytes:
        total = host.device_memory_bytes
        source = "recommended working set"
        free = max(0, total - _held_by_mlx())
    elif host.backend == "cuda" and host.device_memory_bytes:
        total = host.device_memory_bytes
        free = _free_on_card(host.device_memory_bytes)
        source = "free GPU memory"
    else:
        free_ram = available()
        if free_ram is None:
            return None
        total = host.memory_bytes or free_ram
        free = free_ram
        source = "available RAM"
    ram = MemoryBudget(total, free, max(_RESERVE_LEAST, int(total * _RESERVE_SHARE)), source)
    if host.backend != "cpu":
        return ram

    # A limit on the address space, as batch systems set it, may be less.
    space = limited()
    if space is None:
        return ram
    size, used = space
    limit = MemoryBudget(size, max(0, size - used), threads_need(host.usable_cores), _ADDRESS_SPACE)
    return min(ram, limit, key=lambda budget: budget.usable)


def check_fits(
    weight_bytes: int,
    kv_bytes: int,
    overhead_bytes: int,
    limit: MemoryBudget | None,
    context: int | None = None,
    *,
    fitting: int = 0,
) -> None:
    """Raise NotEnoughMemoryError with the figures, unless everything fits or the budget is unknown.

    weight_bytes: of the network.
    kv_bytes: of the KV cache at `context` tokens.
    overhead_bytes: activations and scratch.
    limit: None if unknown.
    context: None if the KV cache is of no stated length.
    fitting: the longest context that would fit, for the hint; 0 if unknown.
    """
    needed = weight_bytes + kv_bytes + overhead_bytes
    if limit is None or needed <= limit.usable:
        return
    if limit.is_address_space:
        raise too_small(limit.total, limit.total - limit.free + limit.reserve + needed)
    kv_cache = "KV cache"
    if context:
        kv_cache = f"KV cache for {context:,} tokens"
    raise NotEnoughMemoryError(
        f"not enough memory: needs {format_bytes(needed)} (weights {format_bytes(weight_bytes)}, "
        f"{kv_cache} {format_bytes(kv_bytes)}, working memory {format_bytes(overhead_bytes)}), "
        f"but {format_bytes(limit.usable)} may be used "
        f"({limit.source} {format_bytes(limit.free)} less {format_bytes(limit.reserve)} reserve)",
        _fit_hint(limit.usable - weight_bytes - overhead_bytes, fitting),
    )


@contextmanager
def reading_weights() -> Iterator[None]:
    """Return freed buffers to the system, not to MLX's cache, while weights are loaded.

    At the end the C allocator's free memory is returned as well.
    """
    import mlx.core as mx

    before = mx.set_cache_limit(LOADING_CACHE_LIMIT)
    try:
        yield
        mx.clear_cache()
    finally:
        mx.set_cache_limit(before)
    _trim_heap()


def release_unused() -> None:
    """Return memory to the system that a freed model leaves with MLX, the CPU kernels and the C allocator."""
    import mlx.core as mx

    from headrace.runtime.ops import native

    native.free_unused()  # first: MLX's allocator caches what is freed
    mx.clear_cache()
    _trim_heap()


def _trim_heap() -> None:
    """Return the C allocator's free memory to the system, where it can (glibc)."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def wired(weight_bytes: int, kv_bytes: int, host: Machine | None = None) -> Iterator[int]:
    """Wire weights and K/V on a Mac's GPU during the block; yields the limit set, 0 if none.

    Smaller weights than _WIRED_FROM of the recommended working set are not wired. HEADRACE_WIRED=0 disables it. Needs
    macOS 15.
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


@contextmanager
def moving_buffers() -> Iterator[None]:
    """Wire nothing in the block, and return each freed buffer to the system at once.

    For loops that replace many buffers: on a Mac, wired memory and a churn of buffers are linked to kernel panics.
    """
    import mlx.core as mx

    wired_before = mx.set_wired_limit(0)
    cached_before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(cached_before)
        mx.set_wired_limit(wired_before)


def _wired_limit(weight_bytes: int, kv_bytes: int, host: Machine) -> int:
    """Return the bytes to wire; 0 for none."""
    working_set = host.device_memory_bytes
    if host.backend != "metal" or not working_set or not environment.wired():
        return 0
    if weight_bytes <= working_set * _WIRED_FROM:
        return 0
    return min(weight_bytes + kv_bytes, int(working_set * _WIRED_SHARE))


def _fit_hint(room: int, fitting: int) -> str:
    """Return a hint for a model that does not fit.

    room: bytes that are left for K/V.
    fitting: see `check_fits`.
    """
    if room <= 0:
        return "the weights alone are too large: choose a smaller model or fewer bits, or close other programs"
    if fitting:
        return f"a context of up to {fitting:,} tokens would fit"
    return f"{format_bytes(room)} would be left for the KV cache: choose a shorter context or a smaller model"


def _held_by_mlx() -> int:
    """Return the bytes this process has allocated on the device."""
    import mlx.core as mx

    return int(mx.get_active_memory())


def _free_on_card(total: int) -> int:
    """Return the free GPU memory, counting all processes (NVML, through MLX)."""
    import mlx.core as mx

    free = mx.device_info(mx.gpu).get("free_memory")
    if not isinstance(free, int):
        return total
    return free
