"""Work of an idle engine: file check, writes to the KV disk cache, bandwidth and compute measurements."""

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from headrace.app.engine.events import Damaged, PeakMeasured
from headrace.app.engine.kv_disk_cache import KVDiskCache
from headrace.app.engine.outbox import Send
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.machine.bandwidth import measure_now, measure_peak
from headrace.runtime.machine.compute import cached_compute, measure_compute
from headrace.runtime.machine.peaks import Peak, cached_peak, correct_peak
from headrace.runtime.metrics.telemetry import Summary, mbu

_MEASURE_EVERY_S = 600.0


class IdleWork:
    """peak, compute_flops: of this machine; None until measured."""

    def __init__(self, resolved: ResolvedModel, disk_cache: KVDiskCache) -> None:
        self.peak: Peak | None = cached_peak()
        self.compute_flops = cached_compute()
        self._disk_cache = disk_cache
        self._check = BackgroundCheck(resolved)
        self._measured_at = float("-inf")
        self._measurable = True
        self._resting = False

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
        self._check.pause()

    def idle(self) -> None:
        self._check.resume()

    def paused(self) -> AbstractContextManager[None]:
        """Pause the file check within a block."""
        return self._check.paused()

    @property
    def due(self) -> bool:
        return not self._resting and (self._disk_cache.write_due or self._measure_due)

    def run(self, stop: Callable[[], bool], send: Send) -> None:
        """Write to the disk cache until `stop()`, or else measure for up to a second. Errors go to the log."""
        if self._disk_cache.write_due:
            self.write_disk_cache(stop)
            return
        try:
            send(self._measure())
        except Exception:
            traceback.print_exc()
            self._measurable = False

    def write_disk_cache(self, stop: Callable[[], bool]) -> None:
        """Write queued K/V until `stop()`. Errors go to the log: K/V can be computed again."""
        if not self._disk_cache.write_due:
            return
        try:
            with self._check.paused():
                self._disk_cache.write(stop)
        except Exception:
            traceback.print_exc()

    def mbu(self, summary: Summary) -> float | None:
        """Return an answer's MBU; a higher bandwidth than measured corrects the peak."""
        faster = correct_peak(summary.achieved_gb_s, step_bytes=summary.mean_step_bytes, steps=summary.steps)
        self.peak = faster or self.peak
        return mbu(summary.achieved_gb_s, self.peak.gb_s if self.peak else None)

    @property
    def _measure_due(self) -> bool:
        if not self._measurable:
            return False
        unknown = self.peak is None or self.compute_flops is None
        return unknown or time.monotonic() - self._measured_at > _MEASURE_EVERY_S

    def _measure(self) -> PeakMeasured:
        """Measure the bandwidth; the compute at the next call, once."""
        with self._check.paused():
            if self.peak is None or self.compute_flops is not None:
                read = measure_peak() if self.peak is None else measure_now("chat")
                self._measured_at = time.monotonic()
                self.peak = cached_peak() or read
            else:
                self.compute_flops = measure_compute()
        return PeakMeasured(self.peak, self.compute_flops)
