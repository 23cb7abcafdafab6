"""The engine: many requests in, events out, on the thread that loaded the network.

`Engine.step` is the heart: it schedules chunks, runs the next batch while the device computes the one before, commits
that one's tokens, and delivers events. A sequence's output does not depend on other sequences.

MLX streams and compiled functions belong to a thread, so an engine is used from one thread for life; only a request's
`CancelFlag` may be set from another. After any end the next request may come, and K/V are freed unless `keep_prefix`
keeps them for the next prompt.

Its user is the `Answerer` (`app/answer/answerer.py`), which adds text; benchmarks and `verify` call it directly.
ARCHITECTURE.md quotes `step` and what it calls, and tests/test_readme.py compares. Guards of a change here:
tests/runtime/engine/test_step_loop.py (order of tokens and entries) and test_identity.py (the same bits in any batch).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.engine.batch_clock import BatchClock
from headrace.runtime.engine.commit import commit_batch
from headrace.runtime.engine.decode import start
from headrace.runtime.engine.drafting import Drafting
from headrace.runtime.engine.ending import Ending
from headrace.runtime.engine.first_pass import FirstPass
from headrace.runtime.engine.in_flight import InFlightBatch
from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.prefill import prefill_prompt
from headrace.runtime.engine.prompt_chunks import ChunkBudget
from headrace.runtime.engine.request import Event, Request, SequenceFailed
from headrace.runtime.engine.scheduler import ScheduledChunk, Scheduler
from headrace.runtime.engine.sequence import Delivery, Sequence
from headrace.runtime.engine.step_timer import StepTimer
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.engine.work_memory import WorkMemory
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.machine.memory import CACHE_LIMIT
from headrace.runtime.machine.out_of_memory import memory_errors
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.network import Network, waiting_for_ranks
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.ngram import RecentAnswers
from headrace.runtime.speculation.pass_costs import PassCostStore

OUTPUT_RESERVED = 1024  # tokens of output that a cache which is copied to grow gets room for at admission
# Waiting sequences whose cancel flags are checked in every step, so that a long queue costs a step no time. Those after
# them are checked as they move up, and `Engine.cancel` ends any of them in the next step.
CHECKED_WAITING = 64


class PrefetchedPrompt(Struct, frozen=True):
    """A prompt's beginning in the KV cache.

    tokens: its entries.
    used_bytes, allocated_bytes: of these entries, and of the cache with its free room.
    reused: entries that were cached before.
    """

    tokens: int
    used_bytes: int
    allocated_bytes: int
    reused: int = 0


class EngineLoad(Struct, frozen=True):
    """Sequences by state, and K/V memory.

    waiting, preempted, prefilling, decoding: numbers of sequences.
    kv_used_bytes: reserved by running sequences.
    kv_room_bytes: that may be reserved in all.
    pool_bytes: allocated by the block pool; 0 without.
    blocks: of the block pool; None without.
    """

    waiting: int
    preempted: int
    prefilling: int
    decoding: int
    kv_used_bytes: int
    kv_room_bytes: int
    pool_bytes: int = 0
    blocks: PoolStats | None = None

    @property
    def kv_share(self) -> float | None:
        """Share of the K/V budget that is reserved; None without a budget."""
        if not self.kv_room_bytes:
            return None
        return self.kv_used_bytes / self.kv_room_bytes


class Engine:
    """Runs one network.

    context_limit: cache entries of a generation; an answer's last token needs none.
    keep_prefix: K/V outlive their request, for later prompts with the same beginning.
    max_running: concurrent sequences.
    kv_memory: bytes for all K/V, a draft model's included, at least one sequence's; None for the machine's free memory.
    kv_key: identity of the K/V on disk.
    chunk_budget: prompt tokens of a pass, instead of the measured budget.
    draft: a smaller network of the same vocabulary.
    pass_costs: stored pass times.

    Users may read `kv`, and set `first_pass.report`, `timer.every` and `ending.on_release`.
    """

    def __init__(
        self,
        network: Network,
        *,
        context_limit: int,
        keep_prefix: bool = False,
        max_running: int = 16,
        kv_memory: int | None = None,
        kv_key: bytes = b"",
        chunk_budget: ChunkBudget | None = None,
        draft: Network | None = None,
        pass_costs: PassCostStore | None = None,
    ) -> None:
        self.network = network
        self.context_limit = context_limit
        self._keeps = keep_prefix
        self._cost = network.cost
        division = network.division
        if division is not None and kv_memory is None:
            kv_memory = division.kv_memory

        # Networks that draft have weights and K/V next to the model's.
        all_kv = list(self._cost.kv)
        weight_bytes = self._cost.weight_bytes
        for drafter in (draft, network.draft_head):
            if drafter is not None:
                all_kv += drafter.cost.kv
                weight_bytes += drafter.cost.weight_bytes
        with_drafts = replace(self._cost, kv=all_kv)
        self._budget = KVBudget(with_drafts, context_limit, kv_memory)
        self.kv = network.kv_backend(KVOptions(context_limit, max_running, keep_prefix, kv_key, self._budget.spare))
        self._memory = WorkMemory(self.kv, weight_bytes, with_drafts.kv_bytes(context_limit))

        self._chunk_budget = chunk_budget or ChunkBudget(wide=network.wide_chunks)
        self._scheduler = Scheduler(
            self._budget,
            self._chunk_budget,
            max_running,
            shares_prefixes=self.kv.shares_prefixes,
            reserved_output=OUTPUT_RESERVED if self.kv.copies_to_grow else 0,
        )
        self._drafting = Drafting(network, draft, pass_costs)
        self.timer = StepTimer()
        self.first_pass = FirstPass()
        self._clock = BatchClock(self._chunk_budget, self.timer, division)
        self.ending = Ending(self.kv, self._scheduler, self._budget)
        self._in_flight: InFlightBatch | None = None  # the newest batch, not read yet; None between answers
        self._cancelled: list[Sequence] = []  # by `cancel`, to end in the next step
        self._generating = False  # within `generate`, which has the engine for itself
        mx.set_cache_limit(CACHE_LIMIT)

    def generate(self, request: Request) -> Iterator[Event]:
        """Answer one request, alone: prefill progress, one `Step` per pass, then exactly one `Finished`.

        Raises UsageError for an empty prompt or ids outside the vocabulary, ContextLimitError for a prompt longer
        than the context limit, EngineError while others are being served, NotEnoughMemoryError where the device's
        memory runs out on the way.
        """
        self._check_idle()
        sequence = self.submit(request, is_reusable=self._keeps)
        self._generating = True
        try:
            while sequence.state != "finished":
                for _, event in self.step():
                    if isinstance(event, SequenceFailed):
                        raise event.error
                    yield event
        finally:
            self._generating = False
            if sequence.state != "finished":  # closed between two events
                self.ending.end(sequence)
            self.ending.release(self._drafting.recent)
            self._stop_work()

    def submit(self, request: Request, *, is_reusable: bool = True) -> Sequence:
        """Queue a request; its events come from `step`. Raises the errors of `generate` that are known now.

        is_reusable: another prompt may begin like it.
        """
        if self._generating:
            raise EngineError("the engine is already generating", "close the other generation first")
        self.check(request)
        self.timer.begin_answer()
        sequence = Sequence(
            request,
            limit=self._budget.limit,
            timeline=Timeline(cost=self._cost, prompt_tokens=len(request.prompt)),
            is_reusable=is_reusable,
            sampler=Sampler(request.sampling, vocab_size=self.network.vocab_size, prompt=request.prompt),
        )
        self._scheduler.waiting.append(sequence)
        return sequence

    def check(self, request: Request) -> None:
        """Raise the errors of `submit` for a request itself. Any thread may call it."""
        request.check(self.network.vocab_size, self.context_limit)
        self._drafting.check(request.speculate)
        self._budget.check(len(request.prompt))

    def prefetch(self, prompt: list[int], stop: Callable[[], bool]) -> PrefetchedPrompt | None:
        """Prefill the expected beginning of the next prompt, while no request waits; return the prefilled part.

        Without `keep_prefix` nothing is done, and None is returned.

        stop: called between chunks; True ends the prefill early, with nothing lost.

        Raises the errors of `generate`.
        """
        self._check_idle()
        self.check(Request(prompt))
        if not self._keeps:
            return None
        try:
            with memory_errors(self._cost.weight_bytes), self.first_pass.watched():
                self._memory.begin_work(num_sequences=1)
                reserved = min(len(prompt) + OUTPUT_RESERVED, self._budget.limit)
                cache = self.kv.acquire(prompt, reserved)
                reused = cache.committed
                prefill_prompt(self.network, self.kv, cache, prompt, self._chunk_budget.alone, stop)
                prefetched = PrefetchedPrompt(cache.committed, cache.committed_bytes, cache.allocated_bytes, reused)
                self.kv.release(cache, prompt)
                self._stop_work()
                return prefetched
        except BaseException:  # Ctrl-C, too, as in `_guarded`
            self._abandon_work()
            raise

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence: its `Finished` comes with the next step. Nothing happens to one that has ended."""
        sequence.cancelled = True
        self._cancelled.append(sequence)

    def close(self) -> None:
        """Drop all sequences and K/V. Other requests may come."""
        self.ending.drop_all()
        self._abandon_work()

    def limit_kv(self, total: int) -> None:
        """Use at most `total` bytes for K/V from now on, or those of one full context."""
        self._budget.limit_total(total)

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do: sequences, or memory to free."""
        return bool(self._scheduler) or self._memory.is_working

    def forget_answers(self) -> None:
        """Drop the recent answers that draft tokens come from: a benchmark gets the same answers again."""
        self._drafting.recent = RecentAnswers()

    def preempt_youngest(self) -> None:
        """Preempt the youngest of several running sequences; its answer does not change."""
        self._scheduler.preempt_youngest()

    def load(self) -> EngineLoad:
        """Return the engine's load."""
        states = Counter(sequence.state for sequence in self._scheduler)
        pool_bytes = 0
        blocks = None
        if self.kv.pool is not None:
            pool_bytes = self.kv.pool.storage.nbytes
            blocks = self.kv.pool.stats
        return EngineLoad(
            waiting=states["waiting"],
            preempted=states["preempted"],
            prefilling=states["prefill"],
            decoding=states["decode"],
            kv_used_bytes=self._budget.used,
            kv_room_bytes=self._budget.total,
            pool_bytes=pool_bytes,
            blocks=blocks,
        )

    def shared_blocks(self, tokens: list[int]) -> int:
        """Return the number of K/V blocks at the beginning of `tokens` that other cached sequences begin with, too."""
        if self.kv.pool is None:
            return 0
        return self.kv.pool.index.shared_blocks(tokens)

    def _check_idle(self) -> None:
        if self._generating or self._scheduler:
            raise EngineError("the engine is already generating", "close the other generation first")

    # -- one step: schedule, run, commit, deliver ------------------------------------------------------------------

    def step(self) -> list[Delivery]:
        """Run one step of all sequences: schedule, run, commit, deliver. May have nothing to deliver yet.

        The device computes one batch while the host schedules and builds the next; then the tokens of the first are
        read. They are read before the schedule if they decide it.

        After an error (see `generate`) every sequence is lost, and the engine ready for others.
        """
        with self._guarded():
            # Sequences that have ended give their memory to others
            self.ending.release(self._drafting.recent)
            events = self._end_due()
            if not self._scheduler:
                if not self.ending:  # events of ends are delivered before memory is freed
                    self._stop_work()
                return events

            # Schedule
            events += self._admit()
            unread = self._in_flight  # the device computes it now
            self._in_flight = None
            decides = unread is not None and unread.decides
            if decides:
                events += self._commit(unread)
                unread = None
            chunks = self._schedule()

            # Run: the device gets the batch before the tokens of the one before are read
            batch = self._run(chunks, unread, follows_read=decides)

            # Commit the batch before; one of prompts only is committed at once, since none is built ahead of its end
            events += self._commit(unread)
            if batch is not None:
                batch.select()  # constrained tokens: their masks are known now
                if batch.chooses:
                    self._in_flight = batch
                else:
                    events += self._commit(batch)

            # Deliver
            return events

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Limit a step's wait for ranks, report a slow first pass, and drop all sequences at an error."""
        try:
            with memory_errors(self._cost.weight_bytes), waiting_for_ranks(self.network), self.first_pass.watched():
                yield
        except BaseException:  # Ctrl-C, too: a step that was half made cannot be continued
            self.close()
            raise

    def _end_due(self) -> list[Delivery]:
        """End sequences that are cancelled, stopped or complete."""
        events: list[Delivery] = []
        checked = [*self._scheduler.running, *islice(self._scheduler.waiting, CHECKED_WAITING), *self._cancelled]
        self._cancelled.clear()
        for sequence in checked:
            if sequence.state == "finished":  # before, or just now: a cancelled sequence may be in the list twice
                continue
            with self.ending.end_on_error(sequence, events):
                if sequence.is_cancelled:
                    events.append((sequence, self.ending.finish(sequence, "cancelled")))
                elif sequence.stop_id is not None:
                    events.append((sequence, self.ending.finish(sequence, "stop", sequence.stop_id)))
                elif not sequence.remaining and not sequence.pending:
                    events.append((sequence, self.ending.finish(sequence, "length")))
        return events

    def _admit(self) -> list[Delivery]:
        """Admit the queued sequences that there is room for; return events of those with a reused prefix."""
        if self._scheduler.waiting:
            # Blocks of sequences that `_end_due` ended are free for those that are admitted now.
            self.ending.release(self._drafting.recent)
        self._memory.begin_work(len(self._scheduler))
        admitted = self._scheduler.admit()
        self.kv.evict()
        events: list[Delivery] = []
        for sequence in admitted:
            cache = self.kv.acquire(sequence.request.prompt, sequence.reserved)
            sequence.cache = cache
            sequence.marks = cache.needs_marks and sequence.is_reusable
            # Rejected draft tokens are rolled back. A sequence that was preempted has its proposers already.
            if self.kv.rolls_back and not sequence.proposers:
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

    def _schedule(self) -> list[ScheduledChunk]:
        """Return the chunks of the next batch: rows that decode, parts of prompts, draft tokens where they pay."""
        chunks = self._drafting.add(self._scheduler.plan(), self._scheduler.extend)
        for chunk in chunks:
            if chunk.chooses:
                chunk.sequence.force_next()
        self.kv.evict()
        return chunks

    def _run(
        self, chunks: list[ScheduledChunk], unread: InFlightBatch | None, *, follows_read: bool
    ) -> InFlightBatch | None:
        """Build the batch of the chunks, and hand it to the device without waiting; return None without chunks.

        unread: the batch that the device computes, and that chooses the first tokens of this one.
        follows_read: the batch before was read in this step, to decide the schedule.
        """
        if not chunks:
            return None
        started_at = time.perf_counter()
        drafting_s = 0.0
        if follows_read:
            # The device was idle since the last read: draft networks ran first, then the host builds this batch. All
            # of that is the step's time, but only what comes after drafting is the pass's.
            drafting_s = self._drafting.spent_s
            started_at = self._clock.read_at + drafting_s
        return start(self.network, self.kv, chunks, unread, started_at, drafting_s)

    def _commit(self, in_flight: InFlightBatch | None) -> list[Delivery]:
        """Wait for a batch, commit it, and return its events; none without a batch."""
        if in_flight is None:
            return []
        computed = in_flight.read()
        self.first_pass.is_over |= in_flight.chooses
        facts = self._clock.read(in_flight, self._drafting.controller)
        return commit_batch(computed, facts, self.kv, self.ending)

    # -- memory around work ----------------------------------------------------------------------------------------

    def _stop_work(self) -> None:
        """Free memory at the end of work."""
        self._in_flight = None
        if self._memory.is_working:
            with waiting_for_ranks(self.network):  # for the batch that was built ahead, if any
                self._memory.end_work()
            self._drafting.save_costs()

    def _abandon_work(self) -> None:
        """Free memory after an error, which is raised, not those of other work that the device still had."""
        self.kv.clear()
        with suppress(RuntimeError):
            self._stop_work()
