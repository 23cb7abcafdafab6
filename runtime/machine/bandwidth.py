"""Memory bandwidth measurement: a streaming read on the device that decodes, stored by `runtime.machine.peaks`.

`measure_peak` takes about a second, `measure_now` a third of one; neither may run before a first token, nor after each
answer of a script (`read_hourly`).

Each pass reads data larger than the caches:
- CPU: the C library's `memcmp` of two equal halves, one thread per usable core and two streams in each. It is
  vectorised, reads every byte and releases the interpreter lock.
- CPU with the native kernels: also `runtime/native/core/streaming.h`, several streams per thread. The faster one counts
  (docs/kernels.md, "Streams"): `measure_peak` alternates between both, `measure_now` uses the stored winner.
- Metal, CUDA: `mx.sum` over a float32 array or the product of a 4-bit matrix and a vector, whichever is faster, with
  several passes per submission.

Every MBU and roofline figure is relative to this. A change of a reader changes them all, so it needs another `_FORMAT`
in `peaks.py`: older measurements are then not compared. tests/runtime/machine/test_bandwidth.py guards this.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.machine.hardware import Machine, machine, memory_available
from headrace.runtime.machine.machine_load import CPUMeter
from headrace.runtime.machine.peaks import Peak, age_s, cached_peak, measurements, store, summarise
from headrace.runtime.metrics.units import counted
from headrace.runtime.ops import native

Progress = Callable[[float], None]
"""Called before each pass with the fraction done, 0 to 1; an exception from it ends the measurement."""

_SECONDS = 0.6  # of passes, without filling the memory
_SHORT_S = 0.15  # of passes of `measure_now`, without filling the memory
_AGAIN_S = 60.0  # age from which a reading is repeated that other programs slowed down
_HOUR_S = 3600.0  # age from which any other reading is repeated
_MIN_PASSES = 8  # also beyond these seconds: the result is an upper quartile
_STREAMS = 8  # per thread (docs/kernels.md)
_SHARE = 128 << 20  # bytes a CPU thread reads: beyond any core's share of the last-level cache
# Bytes of a pass. If memory is short, a CPU's pass may have a quarter of the least (`_cpu_size`).
_LEAST_ON_CPU = 256 << 20  # of all threads, as the next one
_MOST_ON_CPU = 2 << 30
_LEAST_ON_GPU = 64 << 20  # on Metal only
_MOST_ON_GPU = 1 << 30
_GPU_BATCH = 8  # reads per submission
_GPU_TRIALS = 3  # submissions of each reader, of which the fastest tells which reader is used
_COLUMNS = 4096  # of the 4-bit matrix
_GROUP = 64  # its weights with one scale and bias
_ROW_BYTES = _COLUMNS // 2 + _COLUMNS // _GROUP * 4  # half a byte a weight; a float16 scale and bias a group


class Reader(Struct, frozen=True):
    """A streaming read: `one_pass` reads `pass_bytes` bytes and returns the seconds."""

    one_pass: Callable[[], float]
    pass_bytes: int
    method: str


Opener = Callable[[Machine], AbstractContextManager[Reader]]
"""Makes the context of a reader: its memory is filled at entry, and no longer referred to after the block."""


def measure_peak(progress: Progress | None = None, host: Machine | None = None) -> Peak:
    """Measure the peak with every reader and store it, if the cache folder is writable."""
    host = host or machine()
    return _measure(host, _readers(host), _SECONDS, progress or (lambda _: None), "calibration")


def known_peak(host: Machine | None = None, progress: Progress | None = None) -> Peak:
    """Return the stored peak. Measures it if there is none, or a minute after one that other programs slowed down."""
    host = host or machine()
    known = cached_peak(host)
    if known is not None and not (known.busy and age_s(measurements(host)[-1]) >= _AGAIN_S):
        return known
    measured = measure_peak(progress, host)
    return cached_peak(host) or measured


def measure_now(source: str, host: Machine | None = None, progress: Progress | None = None) -> Peak:
    """Measure the current bandwidth, shorter than `measure_peak`, and store it. source: see `Peak`."""
    host = host or machine()
    return _measure(host, _best_readers(host), _SHORT_S, progress or (lambda _: None), source)


def read_hourly(source: str) -> Peak:
    """Return the newest reading of the last hour, of the last minute if other programs slowed it. Else measure now."""
    host = machine()
    for peak in reversed(measurements(host)):
        max_age_s = _AGAIN_S if peak.busy else _HOUR_S
        if peak.source != "decode" and age_s(peak) < max_age_s:
            return peak
    return measure_now(source, host)


def _measure(host: Machine, openers: Sequence[Opener], seconds: float, progress: Progress, source: str) -> Peak:
    """Store a measurement of each reader and return the fastest. The readers take turns, so load slows all of them."""
    meter = CPUMeter()
    with ExitStack() as stack:
        readers = [stack.enter_context(open_reader(host)) for open_reader in openers]
        seconds_of_passes = _repeat([reader.one_pass for reader in readers], seconds, progress)
        use = meter.use()
    mx.clear_cache()  # MLX would keep the freed array
    peaks = []
    busy = use is not None and use.contended
    for reader, passes in zip(readers, seconds_of_passes, strict=True):
        rates = [reader.pass_bytes / pass_s for pass_s in passes]
        peaks.append(summarise(rates, pass_bytes=reader.pass_bytes, method=reader.method, source=source, busy=busy))
        store(peaks[-1], host)
    return max(peaks, key=lambda peak: peak.bytes_per_second)


def streaming_reader(host: Machine) -> AbstractContextManager[Reader]:
    """Open the machine's fastest reader. Measures the peak if it never was."""
    openers = _best_readers(host)
    if len(openers) > 1:
        measure_now("calibration", host)
        openers = _best_readers(host)
    return openers[0](host)


def _readers(host: Machine) -> list[Opener]:
    """Return the readers of a machine: one on a GPU, which chooses between its two kinds itself."""
    if host.backend != "cpu":
        return [_gpu_reader]
    if not native.status().available:
        return [_memcmp_reader]
    return [_memcmp_reader, _native_reader]


def _best_readers(host: Machine) -> list[Opener]:
    """Return the reader of the fastest stored measurement; all readers if there is none."""
    openers = _readers(host)
    known = [peak for peak in measurements(host) if peak.source != "decode"]
    if len(openers) == 1 or not known:
        return openers
    fastest = max(known, key=lambda peak: peak.bytes_per_second)
    if fastest.method == _memcmp_method(host):
        return [_memcmp_reader]
    return [_native_reader]


@contextmanager
def _native_reader(host: Machine) -> Iterator[Reader]:
    """Read by the native kernels. Their library fills the memory, and measures by its own threads."""
    threads = host.usable_cores
    memory = native.streaming_read(_cpu_size(threads), threads, _STREAMS)
    yield Reader(memory.one_pass, memory.bytes, f"{_STREAMS} streams in each of {counted(threads, 'thread')}")


def _memcmp_method(host: Machine) -> str:
    """Return the name of the memcmp reader in measurements, by which `_best_readers` recognises it."""
    return f"memcmp, {counted(host.usable_cores, 'thread')}"


@contextmanager
def _memcmp_reader(host: Machine) -> Iterator[Reader]:
    """Read by `memcmp` of the C library, a thread for each core. An interrupt may end a pass at any point."""
    import ctypes
    import mmap
    import threading
    from queue import SimpleQueue

    threads = host.usable_cores
    # Bytes, rounded down to whole pages of 4,096: `& -4096` clears the last 12 bits. Threads share no such page.
    half = _cpu_size(threads) // threads // 2 & -4096
    libc = ctypes.CDLL(None)  # CDLL, unlike PyDLL, releases the interpreter lock during the call
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memory = mmap.mmap(-1, threads * half * 2)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not supported by the kernel
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = (ctypes.c_char * (threads * half * 2)).from_buffer(memory)
    # An interrupt at any instruction must leave no lock held: SimpleQueue locks in a single one, executors do not.
    passes: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(threads)]
    spans: SimpleQueue[tuple[float, float]] = SimpleQueue()
    ready = threading.Barrier(threads)

    def read(thread: int) -> None:
        share = ctypes.addressof(view) + thread * half * 2  # the closure keeps `view` alive
        # First touch by its own thread places a share in the memory next to its core.
        libc.memset(share, 1, half * 2)
        spans.put((0.0, 0.0))  # no span: it reports that the share is filled, for the loop before `yield`
        with suppress(threading.BrokenBarrierError):
            while passes[thread].get():
                ready.wait()  # all threads begin at once
                began = time.perf_counter()
                libc.memcmp(share, share + half, half)
                spans.put((began, time.perf_counter()))

    def one_pass() -> float:
        for orders in passes:
            orders.put(True)
        done = [spans.get() for _ in passes]
        return max(ended for _, ended in done) - min(began for began, _ in done)

    readers = [threading.Thread(target=read, args=(thread,), daemon=True) for thread in range(threads)]
    try:
        for reader in readers:
            reader.start()
        for _ in readers:  # no pass is timed before all shares are filled
            spans.get()
        yield Reader(one_pass, threads * half * 2, _memcmp_method(host))
    finally:
        for orders in passes:
            orders.put(False)
        ready.abort()  # after an interrupted pass the barrier would wait for missing readers


@contextmanager
def _gpu_reader(host: Machine) -> Iterator[Reader]:
    """Read on the GPU by the faster of two operations, over the same memory."""
    size = min(_MOST_ON_GPU, (host.device_memory_bytes or _MOST_ON_GPU) // 8)
    if host.backend == "metal":  # the GPU's memory is the machine's
        size = _affordable(size, _LEAST_ON_GPU)
    data = mx.arange(size // 4, dtype=mx.float32)
    rows = size // _ROW_BYTES
    # Eight 4-bit weights are in 32 bits. Any bits are valid codes, so the floats serve as a matrix, too.
    matrix = data[: rows * _COLUMNS // 8].view(mx.uint32).reshape(rows, _COLUMNS // 8)  # shares the memory
    scales, biases = (mx.full((rows, _COLUMNS // _GROUP), value, mx.float16) for value in (1.0, -8.0))
    x = mx.ones((1, _COLUMNS), mx.float16)
    mx.eval(data, matrix, scales, biases, x)

    def product() -> mx.array:
        return mx.quantized_matmul(x, matrix, scales=scales, biases=biases, group_size=_GROUP, bits=4)

    def reader(read: Callable[[], mx.array], nbytes: int, method: str) -> Reader:
        def one_pass() -> float:
            began = time.perf_counter()
            mx.eval([read() for _ in range(_GPU_BATCH)])  # several at once: the wait for one would count as reading
            return (time.perf_counter() - began) / _GPU_BATCH

        return Reader(one_pass, nbytes, method)

    kinds = [
        reader(lambda: mx.sum(data), data.nbytes, "mx.sum float32"),
        reader(product, matrix.nbytes + scales.nbytes + biases.nbytes, "4-bit matrix by vector"),
    ]
    for kind in kinds:
        kind.one_pass()  # compiles the kernel, wakes the clocks
    yield max(kinds, key=lambda kind: max(kind.pass_bytes / kind.one_pass() for _ in range(_GPU_TRIALS)))


def _repeat(passes: Sequence[Callable[[], float]], budget_s: float, progress: Progress) -> list[list[float]]:
    """Run passes in turn for about `budget_s`; return the seconds of each."""
    seconds: list[list[float]] = [[] for _ in passes]
    began = time.perf_counter()
    elapsed = 0.0
    while elapsed < budget_s or len(seconds[0]) < _MIN_PASSES:
        progress(min(1.0, elapsed / budget_s))
        for one_pass, pass_seconds in zip(passes, seconds, strict=True):
            pass_seconds.append(one_pass())
        elapsed = time.perf_counter() - began
    progress(1.0)
    return seconds


def _cpu_size(threads: int) -> int:
    """Return the bytes of a pass of all threads."""
    return _affordable(min(max(threads * _SHARE, _LEAST_ON_CPU), _MOST_ON_CPU), _LEAST_ON_CPU // 4)


def _affordable(size: int, least: int) -> int:
    """Return `size` or a quarter of the free memory, whichever is less, but at least `least` bytes."""
    free = memory_available()
    if free is None:
        return size
    return max(least, min(size, free // 4))
