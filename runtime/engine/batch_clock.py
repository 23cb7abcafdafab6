"""Times of batches: for the budget of prompt tokens, for the controller of draft tokens, and for records."""

import time

from headrace.runtime.engine.chunk_budget import ChunkBudget
from headrace.runtime.engine.in_flight import InFlightBatch
from headrace.runtime.engine.step_timer import StepTimer, garbage_seconds
from headrace.runtime.metrics.telemetry import PassFacts
from headrace.runtime.network import Division
from headrace.runtime.speculation.controller import Controller


class BatchClock:
    """Times each batch as it is read.

    pace: learns how long prompt tokens take.
    timer: measures the parts of some steps.
    division: knows the other ranks' times; None on one machine.
    """

    def __init__(self, pace: ChunkBudget, timer: StepTimer, division: Division | None) -> None:
        self._pace = pace
        self._timer = timer
        self._division = division
        self.read_at = 0.0  # when the newest batch was read
        self._garbage_s = 0.0  # of garbage collection until then

    def read(self, in_flight: InFlightBatch, controller: Controller) -> PassFacts:
        """Time a batch that was read just now. controller: learns how long passes with draft tokens take."""
        now = time.perf_counter()
        # The device computes one batch after the other: this one could not begin before the last one was done.
        began = max(self.read_at, in_flight.started)
        follows = in_flight.drafting_s > 0 or began == self.read_at  # else the kernels' clocks ran in between
        self.read_at = now
        pass_s = now - began
        step_s = pass_s + in_flight.drafting_s
        decoding = in_flight.num_decoding
        prompt_tokens = in_flight.num_prompt_tokens
        draft_tokens = in_flight.num_draft_tokens
        only_decodes = decoding > 0 and not prompt_tokens
        if not draft_tokens:
            self._pace.record(decoding, prompt_tokens, pass_s)
        if only_decodes:
            controller.record(decoding, draft_tokens, pass_s, ahead=in_flight.is_ahead, context=in_flight.context)
        host_s = max(0.0, in_flight.built - began)
        parts = self._timer.parts(step_s, host_s, decodes=only_decodes, follows=follows)
        ranks = self._division.rank_times(parts, step_s) if parts is not None and self._division else ()
        garbage_before = self._garbage_s
        self._garbage_s = garbage_seconds()
        return PassFacts(in_flight.batch, prompt_tokens, self._garbage_s - garbage_before, parts, ranks)
