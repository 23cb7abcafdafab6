"""From a request to a running sequence: checked, queued, admitted with a cache and its proposers of draft tokens."""

from headrace.runtime.engine.drafting import Drafting
from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.request import Request
from headrace.runtime.engine.scheduler import Scheduler
from headrace.runtime.engine.sequence import Delivery, Sequence
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.network import Network
from headrace.runtime.sampling.sampler import Sampler


class Admission:
    """Admits the requests of one engine. context_limit: cache entries of a generation."""

    def __init__(
        self,
        network: Network,
        kv: KVBackend,
        *,
        context_limit: int,
        scheduler: Scheduler,
        budget: KVBudget,
        drafting: Drafting,
    ) -> None:
        self._network = network
        self._kv = kv
        self._context_limit = context_limit
        self._scheduler = scheduler
        self._budget = budget
        self._drafting = drafting

    def check(self, request: Request) -> None:
        """Raise what a request cannot be admitted for. Any thread may call it."""
        request.check(self._network.vocab_size, self._context_limit)
        self._drafting.check(request.speculate)
        self._budget.check(len(request.prompt))

    def enter(self, request: Request, *, is_reusable: bool) -> Sequence:
        """Queue a request. is_reusable: another prompt may begin like it."""
        sequence = Sequence(
            request,
            limit=self._budget.limit,
            timeline=Timeline(cost=self._network.cost, prompt_tokens=len(request.prompt)),
            is_reusable=is_reusable,
            sampler=Sampler(request.sampling, vocab_size=self._network.vocab_size, prompt=request.prompt),
        )
        self._scheduler.add(sequence)
        return sequence

    def admit(self) -> list[Delivery]:
        """Admit the queued sequences that there is room for; return events of those with a reused prefix."""
        events: list[Delivery] = []
        admitted = self._scheduler.admit()
        self._kv.evict()
        for sequence in admitted:
            cache = self._kv.acquire(sequence.request.prompt, sequence.reserved)
            sequence.cache = cache
            sequence.marks = cache.needs_marks and sequence.is_reusable
            if self._kv.rolls_back and not sequence.proposers:
                sequence.proposers = self._drafting.proposers(sequence)
            if sequence.served:  # it was preempted
                continue
            sequence.served = True
            sequence.reused = cache.committed
            sequence.reported = cache.committed
            sequence.timeline.admitted(sequence.reused)
            if sequence.reused:
                events.append((sequence, sequence.progress()))
        return events
