"""The engine: many requests in, events out, on the thread that loaded the network.

A step schedules chunks, builds the next batch while the device computes the one before, commits that one's tokens, and
delivers events. A sequence's output does not depend on other sequences.

MLX streams and compiled functions belong to a thread, so an engine is used from one thread for life; only a request's
`CancelFlag` may be set from another. After any end the next request may come, and K/V are freed unless `keep_prefix`
keeps them for the next prompt.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import mlx.core as mx

from headrace.runtime.engine.chunk_budget import ChunkBudget
from headrace.runtime.engine.decode import InFlightBatch, accepted, read, start
from headrace.runtime.engine.draft_model import DraftModel
from headrace.runtime.engine.drafting import Drafting
from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.mtp_draft import MtpDraft
from headrace.runtime.engine.prefill import chunk_end, prefill
from headrace.runtime.engine.request import Event, Failed, Finished, FinishReason, Request, Step
from headrace.runtime.engine.scheduler import ScheduledChunk, Scheduler
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.engine.step_timer import StepTimer, garbage_seconds
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.errors import EngineError, UsageError, expected
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.machine.memory import CACHE_LIMIT, wired
from headrace.runtime.machine.out_of_memory import is_out_of_memory, memory_errors
from headrace.runtime.metrics.telemetry import PassFacts, PoolStats, StepRecord
from headrace.runtime.network import Network
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.forced import Forced
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import Proposer
from headrace.runtime.speculation.suffixes import RecentAnswers

OUTPUT_RESERVED = 1024  # tokens of output that a cache which is copied to grow gets room for at admission
CHECKED_WAITING = 64  # waiting sequences whose cancel flags are checked in every step

Delivery = tuple[Sequence, Event]


@dataclass(frozen=True, slots=True)
class PrefetchedPrompt:
    """Entries of a prompt in the KV cache, and their bytes. reused: entries that were there before."""

    tokens: int
    used_bytes: int
    allocated_bytes: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences by state, and K/V memory. blocks, pool_bytes: of the block pool; None and 0 without."""

    waiting: int
    preempted: int
    prefilling: int
    decoding: int
    kv_used_bytes: int
    kv_room_bytes: int
    pool_bytes: int = 0
    blocks: PoolStats | None = None


class Engine:
    """Runs one network. context_limit: cache entries of a generation; an answer's last token needs none.

    keep_prefix: K/V outlive their request, for later prompts with the same beginning. most_running: concurrent
    sequences. kv_memory: bytes for all K/V, a draft model's included, at least one sequence's; None for the machine's
    free memory. kv_key: identity of the K/V on disk. pace: prompt tokens of a pass, instead of the measured budget.
    draft: a smaller network of the same vocabulary. pass_costs: stored pass times.
    """

    def __init__(
        self,
        network: Network,
        *,
        context_limit: int,
        keep_prefix: bool = False,
        most_running: int = 16,
        kv_memory: int | None = None,
        kv_key: bytes = b"",
        pace: ChunkBudget | None = None,
        draft: Network | None = None,
        pass_costs: PassCostStore | None = None,
    ) -> None:
        self.network = network
        self.context_limit = context_limit
        self._keeps = keep_prefix
        self._cost = network.cost
        self._division = division = network.division
        self._waiting = division.waiting if division else nullcontext
        drafting = [part.cost for part in (draft, network.draft_head) if part is not None]
        with_drafts = replace(self._cost, kv=[*self._cost.kv, *(layer for cost in drafting for layer in cost.kv)])
        self._kv_bytes = with_drafts.kv_bytes(context_limit)
        self._weights = self._cost.weight_bytes + sum(cost.weight_bytes for cost in drafting)
        self._budget = KVBudget(with_drafts, context_limit, kv_memory or (division.kv_memory if division else None))
        self.kv = network.kv_backend(KVOptions(context_limit, most_running, keep_prefix, kv_key, self._budget.spare))
        self._pace = pace or ChunkBudget(wide=network.wide_chunks)
        self._scheduler = Scheduler(
            self._budget,
            self._pace,
            most_running,
            shared=self.kv.shares_prefixes,
            output=OUTPUT_RESERVED if self.kv.copies_to_grow else 0,
        )
        self._draft = draft
        self._drafting = Drafting(network.vocab_size, pass_costs, has_head=network.draft_head is not None)
        self._recent = RecentAnswers()
        self._in_flight: InFlightBatch | None = None  # the newest batch
        self._read_at = 0.0  # when the newest batch was read
        self._garbage_s = 0.0  # of garbage collection until then
        self.timer = StepTimer()
        self._ended: list[Sequence] = []  # whose caches are not released yet
        self._cancelled: list[Sequence] = []
        self.on_release: Callable[[Sequence], None] | None = None  # called before a sequence's cache is released
        self._at_work: ExitStack | None = None  # closed when no work is left
        self._generating = False
        mx.set_cache_limit(CACHE_LIMIT)

    def generate(self, request: Request) -> Iterator[Event]:
        """Answer one request, alone: prefill progress, one `Step` per pass, then exactly one `Finished`.

        Raises UsageError for an empty prompt or ids outside the vocabulary, ContextLimitError for a prompt longer
        than the context limit, EngineError while others are being served, NotEnoughMemoryError where the device's
        memory runs out on the way.
        """
        self._check_idle()
        self.check(request)
        return self._generate(request)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; its events come from `step`. Raises what `generate` raises, now where it can be known."""
        if self._generating:
            raise EngineError("the engine is already generating", "close the other generation first")
        self.check(request)
        return self._enter(request)

    def check(self, request: Request) -> None:
        """Raise what `submit` raises for a request itself. Any thread may call it."""
        request.check(self.network.vocab_size, self.context_limit)
        if request.speculate == "draft" and self._draft is None:
            raise UsageError("speculating with a draft needs a draft model")
        if request.speculate == "mtp" and self.network.draft_head is None:
            raise UsageError("the model has no multi-token prediction head", "--speculate auto takes what there is")
        self._budget.check(len(request.prompt))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence: its `Finished` comes with the next step. Nothing happens to one that has ended."""
        sequence.cancelled = True
        self._cancelled.append(sequence)

    def close(self) -> None:
        """Drop all sequences and K/V. Other requests may come."""
        for sequence in list(self._scheduler):
            self._scheduler.remove(sequence)
            self._ended.append(sequence)
        for sequence in self._ended:
            self._forget_state(sequence)
        self._ended.clear()
        self._abandon_work()

    def limit_kv(self, total: int) -> None:
        """Use at most `total` bytes for K/V from now on, or those of one full context."""
        self._budget.limit_total(total)

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do: sequences, or memory to free."""
        return bool(self._scheduler) or self._at_work is not None

    def forget_answers(self) -> None:
        """Drop the recent answers that draft tokens come from: a benchmark gets the same answers again."""
        self._recent = RecentAnswers()

    def preempt_youngest(self) -> None:
        """Preempt the youngest of several running sequences; its answer does not change."""
        self._scheduler.preempt_youngest()

    def load(self) -> Load:
        """Return the engine's load."""
        states = Counter(sequence.state for sequence in self._scheduler)
        pool = self.kv.pool
        return Load(
            waiting=states["waiting"],
            preempted=states["preempted"],
            prefilling=states["prefill"],
            decoding=states["decode"],
            kv_used_bytes=self._budget.used,
            kv_room_bytes=self._budget.total,
            pool_bytes=pool.storage.nbytes if pool else 0,
            blocks=pool.stats if pool else None,
        )

    def shared_blocks(self, tokens: Row[int]) -> int:
        """Return the number of K/V blocks at the beginning of `tokens` that other cached sequences begin with, too."""
        return self.kv.pool.index.shared_blocks(tokens) if self.kv.pool else 0

    def step(self) -> list[Delivery]:
        """Run one step of all sequences: schedule, run, commit, deliver. May have nothing to deliver yet.

        After an error (see `generate`) every sequence is lost, and the engine ready for others.
        """
        events: list[Delivery] = []
        try:
            with memory_errors(self._cost.weight_bytes), self._waiting():
                self._release_ended()
                self._end_due(events)
                if self._scheduler:
                    self._admit_waiting(events)
                    self._run_and_commit(events)
                elif not self._ended:  # their events are delivered before memory is freed
                    self._stop_work()
        except BaseException:
            self.close()
            raise
        return events

    def _admit_waiting(self, events: list[Delivery]) -> None:
        """Admit sequences, after the blocks of ended ones are released."""
        if self._scheduler.waiting:
            self._release_ended()
        self._start_work()
        admitted = self._scheduler.admit()
        self.kv.evict()
        for sequence in admitted:
            self._admit(sequence, events)

    def _run_and_commit(self, events: list[Delivery]) -> None:
        """Start the next batch, and commit the one before it, first if scheduling needs its tokens."""
        before = self._in_flight
        self._in_flight = None
        decided = before is not None and before.decides
        if before is not None and decided:
            self._commit(before, events)
            before = None
        chunks = self._drafting.add(self._scheduler.plan(), self._scheduler.extend)
        for chunk in chunks:
            if chunk.chooses:
                chunk.sequence.force_next()
        self.kv.evict()
        self._in_flight = start(self.network, self.kv, chunks, before) if chunks else None
        if decided and self._in_flight is not None:
            self._in_flight.drafting_s = self._drafting.spent_s  # its time includes other drafting
            self._in_flight.started = self._read_at + self._drafting.spent_s
        if before is not None:
            self._commit(before, events)
        if self._in_flight is None:
            return
        self._in_flight.select()
        if not self._in_flight.chosen:  # prompts only: no step is built ahead
            before = self._in_flight
            self._in_flight = None
            self._commit(before, events)

    def read_ahead(self, prompt: Row[int], stop: Callable[[], bool]) -> PrefetchedPrompt | None:
        """Prefill what the next prompt is expected to begin with, while nobody waits for an answer.

        Ends early, with nothing lost, once `stop()` says so between two chunks. Says how far it got; None, and nothing
        done, without `keep_prefix`. Raises what `generate` raises.
        """
        self._check_idle()
        self.check(Request(prompt))
        if not self._keeps:
            return None
        try:
            with memory_errors(self._cost.weight_bytes):
                self._start_work()
                reserved = min(len(prompt) + OUTPUT_RESERVED, self._budget.limit)
                cache = self.kv.acquire(prompt, reserved)
                end = len(prompt) - 1
                reused = cache.committed
                while cache.committed < end:
                    until = chunk_end(cache.committed, end, cache.needs_marks)
                    for _ in prefill(self.network, self.kv, cache, prompt[cache.committed : until], self._pace.alone):
                        if cache.needs_marks:
                            self.kv.on_prefill(cache, prompt)
                        self.kv.evict()
                        if stop():
                            end = 0
                            break
                read = PrefetchedPrompt(cache.committed, cache.committed_bytes, cache.allocated_bytes, reused)
                self.kv.release(cache, prompt)
                self._stop_work()
                return read
        except BaseException:
            self._abandon_work()
            raise

    def _check_idle(self) -> None:
        if self._generating or self._scheduler:
            raise EngineError("the engine is already generating", "close the other generation first")

    def _enter(self, request: Request) -> Sequence:
        sampler = Sampler(request.sampling, vocab_size=self.network.vocab_size, prompt=request.prompt)
        timeline = Timeline(cost=self._cost, prompt_tokens=len(request.prompt))
        sequence = Sequence(request, self._budget.limit, timeline, sampler)
        self._scheduler.add(sequence)
        self.timer.begin_answer()
        return sequence

    def _generate(self, request: Request) -> Iterator[Event]:
        self._check_idle()  # again: another generation may have started meanwhile
        sequence = self._enter(request)
        self._generating = True
        try:
            while sequence.state != "finished":
                for _, event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            self._generating = False
            if sequence.state != "finished":  # closed between two events
                self._end(sequence)
            self._release_ended()
            self._stop_work()

    def _end_due(self, events: list[Delivery]) -> None:
        """End sequences that are cancelled, stopped or complete."""
        checked = [*self._scheduler.running, *islice(self._scheduler.waiting, CHECKED_WAITING), *self._cancelled]
        self._cancelled.clear()
        for sequence in checked:
            if sequence.state == "finished":  # before, or just now: a cancelled one may stand in the list twice
                continue
            with self._own_errors(sequence, events):
                if sequence.is_cancelled:
                    events.append((sequence, self._finish(sequence, "cancelled")))
                elif sequence.stop_id is not None:
                    events.append((sequence, self._finish(sequence, "stop", sequence.stop_id)))
                elif not sequence.remaining and not sequence.pending:
                    events.append((sequence, self._finish(sequence, "length")))

    def _admit(self, sequence: Sequence, events: list[Delivery]) -> None:
        """Acquire a sequence's cache."""
        sequence.cache = cache = self.kv.acquire(sequence.request.prompt, sequence.reserved)
        sequence.marks = cache.needs_marks and self._is_reusable
        if self.kv.rolls_back and not sequence.proposers:
            sequence.proposers = self._proposers(sequence)
        if not sequence.served:
            sequence.served = True
            sequence.reused = sequence.reported = cache.committed
            sequence.timeline.admitted(sequence.reused)
            if sequence.reused:
                events.append((sequence, sequence.progress()))

    @property
    def _is_reusable(self) -> bool:
        """Return whether another prompt may begin like a running one."""
        return self._keeps or not self._generating

    def _proposers(self, sequence: Sequence) -> list[Proposer]:
        """Return the sequence's proposers: "auto" means all that need no other model."""
        choice = sequence.request.speculate
        head = self.network.draft_head
        proposers: list[Proposer] = []

        def sampler() -> Sampler:
            return cast(Sampler, sequence.sampler).fork()

        if choice in ("auto", "ngram"):
            proposers.append(NGram(sampled=sequence.request.sampling.temperature > 0, recent=self._recent))
        if choice in ("auto", "mtp") and head is not None:
            sequence.mtp = mtp = MtpDraft(head, sequence.limit, self._drafting.acceptance, sampler)
            proposers.append(mtp)
        if choice == "draft":
            assert self._draft is not None
            proposers.append(DraftModel(self._draft, sequence.limit, self.network.vocab_size, sampler))
        if (constraint := sequence.constraint) is None:
            return proposers
        return [Forced(constraint, inner) for inner in proposers or (None,)]

    def _commit(self, in_flight: InFlightBatch, events: list[Delivery]) -> None:
        """Wait for a batch, commit its entries, and append its events."""
        tokens = in_flight.wait()
        decoding = sum(chunk.phase == "decode" for chunk in in_flight.chunks)
        prompt_tokens = sum(chunk.count for chunk in in_flight.chunks if chunk.phase != "decode")
        shared = self._time(in_flight, decoding, prompt_tokens)
        row = 0
        for chunk in in_flight.chunks:
            sequence = chunk.sequence
            chosen = tokens[row : row + chunk.rows] if chunk.chooses else []
            row += len(chosen)
            if sequence.state == "finished":
                continue
            if chunk.chooses:
                with self._own_errors(sequence, events):
                    if sequence in in_flight.errors:
                        raise in_flight.errors[sequence]
                    events.append(self._commit_decode(chunk, chosen, in_flight, shared))
                continue
            self._hand_over(in_flight, sequence, chunk.count)
            sequence.kv.commit(chunk.count)
            if chunk.phase == "prefill":
                self._commit_prefill(sequence, events)
                if not decoding and sequence.kv.committed == sequence.prefill_end:
                    mx.clear_cache()  # decoding needs no working memory of chunks

    def _time(self, in_flight: InFlightBatch, decoding: int, prompt_tokens: int) -> PassFacts:
        """Time a batch that was read just now, for budgets and records.

        decoding: its sequences that decode. prompt_tokens: those of prompts.
        """
        now = time.perf_counter()
        # The device computes one batch after the other: this one could not begin before the last one was done.
        began = max(self._read_at, in_flight.started)
        follows = in_flight.drafting_s > 0 or began == self._read_at  # else the kernels' clocks ran in between
        self._read_at = now
        pass_s = now - began
        step_s = pass_s + in_flight.drafting_s
        only_decodes = decoding > 0 and not prompt_tokens
        if not in_flight.draft_tokens:
            self._pace.record(decoding, prompt_tokens, pass_s)
        if only_decodes:
            self._drafting.controller.record(
                decoding, in_flight.draft_tokens, pass_s, ahead=in_flight.ahead, context=in_flight.context
            )
        host_s = max(0.0, in_flight.built - began)
        parts = self.timer.parts(step_s, host_s, decodes=only_decodes, follows=follows)
        ranks = self._division.rank_times(parts, step_s) if parts is not None and self._division else ()
        garbage_before = self._garbage_s
        self._garbage_s = garbage_seconds()
        return PassFacts(in_flight.batch, prompt_tokens, self._garbage_s - garbage_before, parts, ranks)

    def _commit_decode(
        self, chunk: ScheduledChunk, chosen: list[int], in_flight: InFlightBatch, shared: PassFacts
    ) -> Delivery:
        """Commit a decode chunk: one token, and as many more as draft tokens were accepted."""
        sequence = chunk.sequence
        draft_tokens = chunk.draft_tokens
        num_accepted = accepted(chosen, draft_tokens)
        output = chosen[: num_accepted + 1]
        stop = next((index for index, token in enumerate(output) if token in sequence.request.stop_ids), None)
        if stop is not None:
            output = output[: stop + 1]
        if sequence.constraint is not None:
            sequence.constraint.accept(output if stop is None else output[:stop])
        num_committed = chunk.again + len(output)
        self._hand_over(in_flight, sequence, num_committed)
        sequence.kv.commit(num_committed)
        source = None
        if draft_tokens:
            cast(Sampler, sequence.sampler).commit(len(output))
            sequence.draft_entries = 0
            source = chunk.source
        sequence.tokens += output
        record = sequence.timeline.step_done(sequence.kv, shared, len(output), len(draft_tokens), source)
        if draft_tokens:
            sequence.kv.rollback()
        values = in_flight.logprobs.get(sequence)
        if stop is not None:
            if not stop:
                return sequence, self._finish(sequence, "stop", output[0], record)
            sequence.stop_id = output.pop()
        sequence.output_count += len(output)
        logprobs = None if values is None else tuple(read(value) for value in values[: len(output)])
        return sequence, Step(tuple(output), record, logprobs, draft_tokens[num_accepted:])

    def _hand_over(self, in_flight: InFlightBatch, sequence: Sequence, count: int) -> None:
        """Give the hidden states of the next `count` committed positions to the proposer that drafts from them."""
        hidden = in_flight.hidden.get(sequence)
        if hidden is not None and sequence.mtp is not None:
            sequence.mtp.take(sequence.kv.committed, hidden[:, :count])

    def _commit_prefill(self, sequence: Sequence, events: list[Delivery]) -> None:
        """Report a committed chunk of a prompt, and share it."""
        cache = sequence.kv
        if self._is_reusable:
            self.kv.on_prefill(cache, sequence.tokens)
        if cache.committed > sequence.reported:  # else it was preempted, and computes these entries again
            sequence.reported = cache.committed
            events.append((sequence, sequence.progress()))
            sequence.timeline.prefilled()

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_id: int | None = None, record: StepRecord | None = None
    ) -> Finished:
        after = sequence.request.cancel.after
        if after is not None and sequence.output_count >= after:  # the answer may end within a step
            sequence.timeline.discard_tokens(sequence.output_count - after + (sequence.stop_id is not None))
            sequence.output_count = after
        finished = Finished(reason, sequence.timeline.summary(sequence.cache, sequence.output_count), stop_id, record)
        self._end(sequence)
        return finished

    def _end(self, sequence: Sequence) -> None:
        """End a sequence. The entry of an in-flight token is committed, draft tokens are rolled back."""
        if sequence.cache is not None:
            sequence.cache.commit(sequence.cache.length - sequence.cache.committed - sequence.draft_entries)
            if sequence.draft_entries:
                sequence.cache.rollback()
        self._scheduler.remove(sequence)
        self._ended.append(sequence)

    @contextmanager
    def _own_errors(self, sequence: Sequence, events: list[Delivery]) -> Iterator[None]:
        """End only this sequence on errors raised within."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or sequence.state == "finished":
                raise
            self._scheduler.remove(sequence)
            sequence.failed = True
            self._ended.append(sequence)
            events.append((sequence, Failed(expected(error))))

    def _release_ended(self) -> None:
        """Release the caches of ended sequences."""
        for sequence in self._ended:
            if sequence.cache is not None and self.on_release is not None:
                self.on_release(sequence)
            if sequence.proposers:
                self._recent.add(sequence.tokens[len(sequence.request.prompt) :])
            if sequence.cache is not None and sequence.failed:
                sequence.cache.close()
            elif sequence.cache is not None:
                self.kv.release(sequence.cache, sequence.tokens)
            self._forget_state(sequence)
        self._ended.clear()

    def _forget_state(self, sequence: Sequence) -> None:
        if sequence.mtp is not None:
            sequence.mtp.close()
        sequence.cache = sequence.sampler = None  # users may keep the sequence
        sequence.proposers = []
        sequence.mtp = None
        self._budget.release(sequence)

    def _start_work(self) -> None:
        """Wire memory at the beginning of work, for one sequence alone: batches free and make buffers."""
        if self._at_work is None:
            mx.reset_peak_memory()
            self._at_work = ExitStack()
            self._at_work.enter_context(wired(self._weights, self._kv_bytes))
        if len(self._scheduler.running) + len(self._scheduler.waiting) > 1:
            self._at_work.pop_all().close()

    def _abandon_work(self) -> None:
        """Free memory after an error, which is raised, not those of other work that the device still had."""
        self.kv.clear()
        with suppress(RuntimeError):
            self._stop_work()

    def _stop_work(self) -> None:
        """Free memory at the end of work."""
        self._in_flight = None
        if self._at_work is None:
            return
        with self._at_work:
            self._at_work = None
            # clear_cache waits for the device with the interpreter lock held, which would stop every other thread for
            # the rest of the step that was built ahead: wait for that one without the lock first.
            mx.synchronize()
            self.kv.trim()
            mx.clear_cache()
            self._drafting.keep()
