"""Work of an idle engine: file check, writes to the KV disk cache, bandwidth and compute measurements.

A measurement waits for the first answer and for the end of typing, and stops when a command arrives. The command loop
(`process.py`) calls `run` whenever `due` is true and no command has come for `after_s`; `EngineHost` tells `busy` and
`idle`.

Guard: tests/app/engine/test_idle_work.py.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial

from headrace.app.engine.events import Damaged, PeakMeasured
from headrace.app.engine.kv_disk_cache import KVDiskCache
from headrace.app.engine.outbox import Send
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.machine.bandwidth import measure_now, measure_peak
from headrace.runtime.machine.compute import cached_compute, measure_compute
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.machine_load import CPUMeter
from headrace.runtime.machine.peaks import Peak, cached_peak, correct_peak
from headrace.runtime.metrics.telemetry import Summary, mbu

_AFTER_S = 1.5  # without a command, before idle work
_PREPARE_AFTER_S = 0.2  # the same, before `prepare`
_LOOK_S = 0.01  # between two looks for a command


class _Interrupted(Exception):  # noqa: N818 - no error
    """A command arrived during a measurement."""


class _MeasureState(Enum):
    """The time at which the bandwidth is measured next.

    The end of an answer leads to ANSWERED, a measurement to MEASURED, an error of one to FAILED, which is final.
    """

    NO_ANSWER = auto()  # not before an answer has ended
    ANSWERED = auto()  # soon: an answer has ended since the latest measurement
    MEASURED = auto()  # later: none has
    FAILED = auto()  # never


_MEASURE_EVERY_S = {_MeasureState.ANSWERED: 60.0, _MeasureState.MEASURED: 600.0}
"""Seconds since the latest measurement."""


class IdleWork:
    """Idle work of one engine, and the measurements it has.

    peak, compute_flops: of this machine; None until measured.
    memory_gb_s: the latest bandwidth read while no other program kept the CPUs busy; None until there is one.
    typing: a message is being written: nothing is measured.
    prepare: work to do once, first; None if there is none.
    """

    def __init__(self, resolved: ResolvedModel, disk_cache: KVDiskCache) -> None:
        self.peak: Peak | None = cached_peak()
        self.compute_flops = cached_compute()
        self.memory_gb_s: float | None = None
        self._disk_cache = disk_cache
        self._check = BackgroundCheck(resolved)
        self._resting = False
        self._measuring = _MeasureState.NO_ANSWER
        self._measured_at = float("-inf")
        self._reader: threading.Thread | None = None  # of the latest bandwidth measurement, which may still run
        self.typing = False
        self.prepare: Callable[[], None] | None = None

    def start(self, send: Send) -> None:
        """Check the model's files in the background; sends Damaged if they differ from the installed ones."""
        self._check.start(lambda damage: send(Damaged(str(damage), damage.hint)))

    def rest(self) -> None:
        """Do nothing until `resume`."""
        self._resting = True
        self._check.pause()

    def resume(self) -> None:
        if self._resting:
            self._resting = False
            self._check.resume()

    def busy(self) -> None:
        """Pause the file check while answers are generated."""
        self.typing = False
        self._check.pause()

    def idle(self) -> None:
        """Go on with the file check, after the last answer has ended."""
        if self._measuring is not _MeasureState.FAILED:
            self._measuring = _MeasureState.ANSWERED
        self._check.resume()

    def paused(self) -> AbstractContextManager[None]:
        """Pause the file check within a block."""
        return self._check.paused()

    @property
    def due(self) -> bool:
        return not self._resting and (self.prepare is not None or self._disk_cache.write_due or self._measure_due)

    @property
    def after_s(self) -> float:
        """Seconds without a command after which `run` is called."""
        return _AFTER_S if self.prepare is None else _PREPARE_AFTER_S

    def run(self, stop: Callable[[], bool], send: Send) -> None:
        """Prepare, write to the disk cache, or else measure for up to a second, until `stop()`. Errors are logged."""
        if self.prepare is not None:
            prepare = self.prepare
            self.prepare = None
            try:
                prepare()
            except Exception:  # nobody asked for it: only the log has it
                traceback.print_exc()
            return
        if self._disk_cache.write_due:
            self.write_disk_cache(stop)
            return
        try:
            send(self._measure(stop))
        except _Interrupted:
            pass
        except Exception:
            traceback.print_exc()
            self._measuring = _MeasureState.FAILED

    def write_disk_cache(self, stop: Callable[[], bool]) -> None:
        """Write queued K/V until `stop()`. Errors go to the log: K/V can be computed again."""
        if not self._disk_cache.write_due:
            return
        try:
            with self._check.paused():
                self._disk_cache.write(stop)
        except Exception:  # the cache only saves time: only the log has it
            traceback.print_exc()

    def mbu(self, summary: Summary) -> float | None:
        """Return an answer's MBU, None if busy; a higher bandwidth than measured corrects the peak."""
        faster = correct_peak(summary.achieved_gb_s, step_bytes=summary.mean_step_bytes, steps=summary.steps)
        self.peak = faster or self.peak
        peak_gb_s = self.peak.gb_s if self.peak else None
        return mbu(summary.achieved_gb_s, self.memory_gb_s, peak_gb_s, busy=summary.busy).share

    @property
    def _measure_due(self) -> bool:
        interval_s = _MEASURE_EVERY_S.get(self._measuring)
        if interval_s is None or self.typing:
            return False
        if self._reader is not None and self._reader.is_alive():  # of an interrupted one
            return False
        unknown = self.peak is None or self.compute_flops is None
        return unknown or time.monotonic() - self._measured_at > interval_s

    def _measure(self, stop: Callable[[], bool]) -> PeakMeasured:
        """Measure the bandwidth; the compute at the next call, once."""
        with self._check.paused():
            # The bandwidth first, which the screen waits for; then the arithmetic, once; then the bandwidth again.
            if self.peak is None or self.compute_flops is not None:
                meter = CPUMeter([os.getppid()])  # the chat's process
                read = self._read_memory(stop)
                use = meter.use()
                if use is None or not use.contended:
                    self.memory_gb_s = read.gb_s
                self._measured_at = time.monotonic()
                self._measuring = _MeasureState.MEASURED
                self.peak = cached_peak() or read
            else:
                self.compute_flops = measure_compute(_checked(stop))
        return PeakMeasured(self.peak, self.compute_flops, self.memory_gb_s)

    def _read_memory(self, stop: Callable[[], bool]) -> Peak:
        """Measure the bandwidth on another thread: filling the memory takes up to a second and cannot be stopped."""
        check = _checked(stop)
        measure = partial(measure_now, "chat") if self.peak is not None else measure_peak
        if machine().backend != "cpu":  # MLX's arrays belong to this thread
            return measure(progress=check)
        outcome: Future[Peak] = Future()

        def read() -> None:
            try:
                outcome.set_result(measure(progress=check))
            except Exception as error:  # `result` raises it in the thread that waits
                outcome.set_exception(error)

        self._reader = threading.Thread(target=read, name="bandwidth", daemon=True)
        self._reader.start()
        while not outcome.done():
            check(0.0)
            wait([outcome], _LOOK_S)
        return outcome.result()


def _checked(stop: Callable[[], bool]) -> Callable[[float], None]:
    """Return a progress callback that ends a measurement on `stop()`."""

    def check(_: float) -> None:
        if stop():
            raise _Interrupted

    return check
