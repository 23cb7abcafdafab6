"""Time of a decode step by part, measured for a sample of the steps.

The CPU kernels add up the wall time of their parallel regions by kind of work. A timed step begins when the step before
it was read and ends when it is read itself; the device works ahead of both by the same few microseconds. Other kernels
have no such clocks: no step is timed then. A timed step costs two clock reads per region and thread.

The first decode steps of each answer are all timed, so that short answers have times, too.

`BatchClock` asks for the parts after each batch. The engine process (`app/engine/host.py`) sets `StepTimer.every`
before each step. The parts appear as `StepParts` in step records.

Guard: tests/runtime/engine/test_step_timer.py.
"""

from headrace.runtime import ops
from headrace.runtime.metrics.telemetry import StepParts
from headrace.runtime.ops.native import RegionTimes

FIRST_TIMED = 4  # steps of an answer, with the one that feeds the last prompt token


class StepTimer:
    """Choice of the decode steps that are timed, and their parts.

    `begin_answer` is called for each new sequence, `parts` after each step.

    every: after the first decode steps, one step in so many is timed; 0: no step at all. `parts` reads it anew.
    """

    def __init__(self) -> None:
        self.every = 0
        self._steps = 0  # without prompts, since the latest answer began
        self._times = False  # the kernels' clocks run: the step in flight is timed
        self._usable = ops.select() is ops.native

    def begin_answer(self) -> None:
        """Time the first steps that come now."""
        self._steps = 0

    def parts(self, seconds: float, host_s: float, *, decodes: bool, follows: bool = True) -> StepParts | None:
        """Return the parts of the step that was read just now, if it was timed; start the clocks if the next one is.

        seconds: of the step.
        host_s: the part of them without a queued step.
        decodes: it fed no prompt.
        follows: it followed the step before at once.
        """
        every = self.every
        if not self._times and not every:
            return None
        parts = None
        if self._times and decodes and follows:
            parts = _parts(ops.native.region_times(), seconds, host_s)  # since the clocks were started
        self._steps += decodes
        due = self._usable and every > 0 and self._is_sampled(every)
        if due or self._times:  # starting again resets the clocks
            ops.native.measure_regions(due)
        self._times = due
        return parts

    def _is_sampled(self, every: int) -> bool:
        """Return True if the next step is to be timed: the samples continue from the last of the first steps."""
        return self._steps < FIRST_TIMED or (self._steps + 1 - FIRST_TIMED) % every == 0


def _parts(times: dict[str, RegionTimes], seconds: float, host_s: float) -> StepParts | None:
    """Return the parts of a step of `seconds`; together at most the step.

    times: by kind of work, as `native.region_times` returns them.
    host_s: see `StepTimer.parts`.
    None if the kernels read no weights: the network runs without them.
    """
    if not times["weights"].regions:
        return None
    computing_s = {kind: max(0.0, (of_kind.wall_ns - of_kind.waiting_ns) / 1e9) for kind, of_kind in times.items()}
    parts = StepParts(
        weights_s=computing_s["weights"],
        kv_s=computing_s.get("attention", 0.0),
        sampling_s=computing_s.get("sampling", 0.0),
        waiting_s=sum(of_kind.waiting_ns for of_kind in times.values()) / 1e9,
        host_s=max(0.0, host_s),
    )
    total_s = parts.weights_s + parts.kv_s + parts.sampling_s + parts.waiting_s + parts.host_s
    if total_s <= seconds:
        return parts
    # The clocks of threads and of the host differ a little, so the parts may come to more than the step.
    scale = seconds / total_s
    return StepParts(
        weights_s=parts.weights_s * scale,
        kv_s=parts.kv_s * scale,
        sampling_s=parts.sampling_s * scale,
        waiting_s=parts.waiting_s * scale,
        host_s=parts.host_s * scale,
    )
