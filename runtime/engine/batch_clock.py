"""Times of batches: facts for the records of steps, and measured costs for the next schedules.

The engine's one `BatchClock` is read when a batch was read (`Engine._commit`).

Guards: tests/runtime/engine/test_step_timer.py and test_step_loop.py.
"""

import time

from headrace.runtime.engine.in_flight import InFlightBatch
from headrace.runtime.engine.prompt_chunks import ChunkBudget
from headrace.runtime.engine.step_timer import StepTimer
from headrace.runtime.machine.garbage import garbage_seconds
from headrace.runtime.metrics.telemetry import PassFacts, RankTimes
from headrace.runtime.network import Division
from headrace.runtime.speculation.controller import Controller


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
