"""Time of a decode step by part, measured for a sample of the steps, and time of Python's garbage collection.

The CPU kernels add up the wall time of their parallel regions by kind of work. A timed step begins when the step before
it was read and ends when it is read itself; the device works ahead of both by the same few microseconds. Other kernels
have no such clocks: no step is timed then. A timed step costs two clock reads per region and thread.

The first decode steps of each answer are all timed, so that short answers have times, too.

`BatchClock` belongs to the engine, and is read once for each batch. The engine process (`app/engine/host.py`) sets
`StepTimer.every` before each step and calls `watch_garbage` once. The parts appear as `StepParts` in step records.

Guard: tests/runtime/engine/test_step_timer.py.
"""

import gc
import time
from typing import Literal

from headrace.runtime import ops
from headrace.runtime.engine.in_flight import InFlightBatch
from headrace.runtime.engine.prefill import ChunkBudget
from headrace.runtime.metrics.telemetry import PassFacts, RankTimes, StepParts
from headrace.runtime.network import Division
from headrace.runtime.ops.native import RegionTimes
from headrace.runtime.speculation.controller import Controller

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


class _Garbage:
    """Garbage collection of this process since `watch_garbage`; the class itself has the state."""

    seconds = 0.0  # spent in all
    began = 0.0  # clock at the start of the collection that runs
    watched = False


def watch_garbage() -> None:
    """Measure garbage collection in this process from now on."""
    if not _Garbage.watched:
        _Garbage.watched = True
        gc.callbacks.append(_note)


def garbage_seconds() -> float:
    """Return the seconds of garbage collection so far; 0 if it is not watched."""
    return _Garbage.seconds


def _note(phase: Literal["start", "stop"], info: dict[str, int]) -> None:  # noqa: ARG001
    """Count a collection: Python calls it before and after each one (`gc.callbacks`)."""
    if phase == "start":
        _Garbage.began = time.perf_counter()
    else:
        _Garbage.seconds += time.perf_counter() - _Garbage.began


class BatchClock:
    """Times each batch as it is read.

    chunk_budget: gets the times of passes without draft tokens.
    timer: measures the parts of some steps.
    division: gives the other ranks' times; None on one machine.
    """

    def __init__(self, chunk_budget: ChunkBudget, timer: StepTimer, division: Division | None) -> None:
        self._chunk_budget = chunk_budget
        self._timer = timer
        self._division = division
        self.read_at = 0.0  # when the newest batch was read
        self._garbage_s = 0.0  # of garbage collection until then

    def read(self, in_flight: InFlightBatch, controller: Controller) -> PassFacts:
        """Time a batch that was read just now. controller: gets the times of passes without prompt tokens."""
        now = time.perf_counter()
        # The device computes one batch after the other: this one could not begin before the last one was done.
        began = max(self.read_at, in_flight.started_at)
        follows = in_flight.drafting_s > 0 or began == self.read_at  # else the kernels' clocks ran in between
        self.read_at = now

        # Costs of prompt tokens and of draft tokens, for later decisions
        pass_s = now - began
        step_s = pass_s + in_flight.drafting_s
        decoding = in_flight.num_decoding
        prompt_tokens = in_flight.num_prompt_tokens
        draft_tokens = in_flight.num_draft_tokens
        only_decodes = decoding > 0 and not prompt_tokens
        if not draft_tokens:
            self._chunk_budget.record(decoding, prompt_tokens, pass_s)
        if only_decodes:
            controller.record(decoding, draft_tokens, pass_s, ahead=in_flight.is_ahead, context=in_flight.context)

        # The step by part, where it was timed; then by rank, too
        host_s = max(0.0, in_flight.built_at - began)
        parts = self._timer.parts(step_s, host_s, decodes=only_decodes, follows=follows)
        ranks: tuple[RankTimes, ...] = ()
        if parts is not None and self._division is not None:
            ranks = self._division.rank_times(parts, step_s)
        garbage_before = self._garbage_s
        self._garbage_s = garbage_seconds()
        return PassFacts(
            batch=len(in_flight.chunks),
            passes=len(in_flight.passes),
            fed=prompt_tokens,
            gc_s=self._garbage_s - garbage_before,
            parts=parts,
            ranks=ranks,
        )
