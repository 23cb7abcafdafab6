"""The engine: requests in, events out, many at a time, on the thread that loaded the network.

A step schedules (who is served, who gets how many tokens), runs (builds the next pass while the device works on the one
before), commits what has landed, and delivers its events. What a sequence says does not depend on who is beside it.

MLX streams and compiled functions belong to a thread, so an engine is used from one thread for life; only a
request's `CancelFlag` may be touched from elsewhere. After any end (finished, cancelled, closed, failed) the next
request may come, and what K/V there are is given back, unless `keep_prefix` holds on to it for the next prompt.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import mlx.core as mx

from headrace.runtime.engine.chunk_budget import Pace
from headrace.runtime.engine.decode import Flight, agreed, read, start
from headrace.runtime.engine.draft_model import Draft
from headrace.runtime.engine.drafting import Guesses
from headrace.runtime.engine.kv_budget import Room
from headrace.runtime.engine.prefill import chunk_end, prefill
from headrace.runtime.engine.request import Event, Failed, Finished, FinishReason, Request, Step
from headrace.runtime.engine.scheduler import Scheduler, Share
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.errors import EngineError, UsageError, expected
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.machine.memory import CACHE_LIMIT, wired
from headrace.runtime.machine.out_of_memory import is_out_of_memory, memory_errors
from headrace.runtime.metrics.telemetry import PoolStats, StepRecord
from headrace.runtime.network import Network
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import Proposer

NEXT_IN_LINE = 64  # of those that wait: whose cancel flags are looked at in every step

Delivery = tuple[Sequence, Event]


@dataclass(frozen=True, slots=True)
class ReadSoFar:
    """How many entries of a prompt are in the KV cache, and their bytes."""

    tokens: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences are where, and the memory that K/V take of what they may.

    blocks: of the pool, and pool_bytes what they take; None and 0 as long as there is none.
    """

    waiting: int
    preempted: int
    prefilling: int
    decoding: int
    kv_used_bytes: int
    kv_room_bytes: int
    pool_bytes: int = 0
    blocks: PoolStats | None = None


class Engine:
    """Runs one network. `context_limit` bounds the cache entries of a generation: an answer's last token needs none.

    keep_prefix: a conversation. K/V outlive their request, and of the next prompt only what is new is prefilled.
    most_running: sequences served at a time; others wait. kv_memory: bytes that the K/V of all of them may take, a
    draft's included; None for what the machine has free, and never less than one sequence may need. kv_key: what
    tells K/V apart on disk. pace: how prompts are cut, where the measured speed shall not say it. draft: a smaller
    network with the same vocabulary, for requests that are to be speculated on with it. pass_costs: where what
    passes with guesses take is remembered.
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
        pace: Pace | None = None,
        draft: Network | None = None,
        pass_costs: PassCostStore | None = None,
    ) -> None:
        self.network = network
        self.context_limit = context_limit
        self._keeps = keep_prefix
        self._cost = network.cost
        held = replace(self._cost, kv=[*self._cost.kv, *draft.cost.kv]) if draft else self._cost
        self._held = held.kv_bytes(context_limit)
        self._weights = self._cost.weight_bytes + (draft.cost.weight_bytes if draft else 0)
        self._room = Room(held, context_limit, kv_memory)
        self.kv = network.kv_backend(KVOptions(context_limit, most_running, keep_prefix, kv_key, self._room.spare))
        self._pace = pace or Pace()
        self._scheduler = Scheduler(self._room, self._pace, most_running, shared=self.kv.pool is not None)
        self._draft = draft
        self._guesses = Guesses(network.vocab_size, pass_costs)
        self._flight: Flight | None = None  # the pass under way
        self._landed = 0.0  # when the newest pass had landed
        self._ended: list[Sequence] = []  # whose caches are still to be kept or given back
        self._cancelled: list[Sequence] = []
        self.on_release: Callable[[Sequence], None] | None = None  # is called before a sequence's cache is released
        self._at_work: ExitStack | None = None  # what is to be undone when nothing is left to do
        self._generating = False
        mx.set_cache_limit(CACHE_LIMIT)

    def generate(self, request: Request) -> Iterator[Event]:
        """Answer one request, alone: prefill progress, one `Step` per pass, then exactly one `Finished`.

        Raises UsageError for an empty prompt or ids outside the vocabulary, ContextLimitError for a prompt longer
        than the context limit, EngineError while others are being served, NotEnoughMemoryError where the device's
        memory runs out on the way.
        """
        self._claimable()
        self._check(request)
        return self._generate(request)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; its events come from `step`. Raises what `generate` raises, now where it can be known."""
        if self._generating:
            raise EngineError("the engine is already generating", "close the other generation first")
        self._check(request)
        return self._enter(request)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence: its `Finished` comes with the next step. Nothing happens to one that has ended."""
        sequence.cancelled = True
        self._cancelled.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: sequences to serve, or what they leave behind to put away."""
        return bool(self._scheduler) or self._at_work is not None

    def preempt_youngest(self) -> None:
        """Preempt the youngest of several running sequences; its answer does not change."""
        self._scheduler.preempt_youngest()

    def load(self) -> Load:
        """How busy the engine is."""
        states = Counter(sequence.state for sequence in self._scheduler)
        pool = self.kv.pool
        return Load(
            waiting=states["waiting"],
            preempted=states["preempted"],
            prefilling=states["prefill"],
            decoding=states["decode"],
            kv_used_bytes=self._room.used,
            kv_room_bytes=self._room.total,
            pool_bytes=pool.storage.nbytes if pool else 0,
            blocks=pool.stats if pool else None,
        )

    def step(self) -> list[Delivery]:
        """One step of everyone who can make one: schedule, run, commit, deliver. May have nothing to deliver yet.

        Where it raises (see `generate`), every sequence is lost, and the engine ready for others.
        """
        events: list[Delivery] = []
        try:
            with memory_errors(self._cost.weight_bytes):
                self._put_away()
                self._hear(events)
                if not self._scheduler:
                    if not self._ended:  # nobody waits for an event while memory is given back
                        self._rest()
                    return events
                if self._scheduler.waiting:  # blocks have to be back before the next sequence takes its own
                    self._put_away()
                self._work()
                admitted = self._scheduler.admit()
                self.kv.evict()
                for sequence in admitted:
                    self._admit(sequence, events)
                landing, self._flight = self._flight, None
                decided = landing is not None and landing.decides
                if landing is not None and decided:  # what comes next has to be known first
                    self._land(landing, events)
                    landing = None
                shares = self._guesses.add(self._scheduler.plan(), self._scheduler.extend)
                self.kv.evict()
                self._flight = start(self.network, self.kv, shares, landing) if shares else None
                if decided and self._flight is not None:
                    self._flight.started = self._landed  # guessing is part of what it takes
                if landing is not None:
                    self._land(landing, events)
                if self._flight is not None and self._flight.token is None:  # prompts alone: nothing to run ahead of
                    landing, self._flight = self._flight, None
                    self._land(landing, events)
        except BaseException:
            self._abandon()
            raise
        return events

    def read_ahead(self, prompt: Row[int], stop: Callable[[], bool]) -> ReadSoFar | None:
        """Prefill what the next prompt is expected to begin with, while nobody waits for an answer.

        Ends early, with nothing lost, once `stop()` says so between two chunks. Says how far it got; None, and nothing
        done, without `keep_prefix`. Raises what `generate` raises.
        """
        self._claimable()
        self._check(Request(prompt))
        if not self._keeps:
            return None
        try:
            with memory_errors(self._cost.weight_bytes):
                self._work()
                cache, end = self.kv.acquire(prompt), len(prompt) - 1
                while cache.committed < end:
                    until = chunk_end(cache.committed, end, cache.needs_marks)
                    for _ in prefill(self.network, self.kv, cache, prompt[cache.committed : until], self._pace.alone):
                        cache.mark()
                        self.kv.evict()
                        if stop():
                            end = 0
                            break
                read = ReadSoFar(cache.committed, cache.committed_bytes, cache.allocated_bytes)
                self.kv.release(cache, prompt)
                return read
        except BaseException:
            self.kv.clear()
            raise
        finally:
            self._rest()

    def _claimable(self) -> None:
        if self._generating or self._scheduler:
            raise EngineError("the engine is already generating", "close the other generation first")

    def _check(self, request: Request) -> None:
        request.check(self.network.vocab_size, self.context_limit)
        if request.speculate == "draft" and self._draft is None:
            raise UsageError("speculating with a draft needs a draft model")
        self._room.check(len(request.prompt))

    def _enter(self, request: Request) -> Sequence:
        sampler = Sampler(request.sampling, vocab_size=self.network.vocab_size, prompt=request.prompt)
        timeline = Timeline(cost=self._cost, prompt_tokens=len(request.prompt))
        sequence = Sequence(request, self._room.limit, timeline, sampler)
        self._scheduler.add(sequence)
        return sequence

    def _generate(self, request: Request) -> Iterator[Event]:
        self._claimable()  # again: another generation may have started since this one was made
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
            self._put_away()
            self._rest()

    def _hear(self, events: list[Delivery]) -> None:
        """End those who were cancelled, and those who have said all there was room for."""
        heard = [*self._scheduler.running, *islice(self._scheduler.waiting, NEXT_IN_LINE), *self._cancelled]
        self._cancelled.clear()
        for sequence in heard:
            if sequence.state == "finished":  # before, or just now: it may be among those heard twice
                continue
            with self._own_errors(sequence, events):
                if sequence.wants_to_end:
                    events.append((sequence, self._finish(sequence, "cancelled")))
                elif sequence.stop_id is not None:
                    events.append((sequence, self._finish(sequence, "stop", sequence.stop_id)))
                elif not sequence.remaining and not sequence.pending:
                    events.append((sequence, self._finish(sequence, "length")))

    def _admit(self, sequence: Sequence, events: list[Delivery]) -> None:
        """Give a sequence its cache."""
        sequence.cache = cache = self.kv.acquire(sequence.request.prompt)
        sequence.marks = self._keeps and cache.needs_marks
        if self.kv.rolls_back and not cache.needs_marks:
            sequence.proposer = sequence.proposer or self._proposer(sequence)
        if not sequence.served:
            sequence.served = True
            sequence.reused = sequence.told = cache.committed
            sequence.timeline.admitted(sequence.reused)
            if sequence.reused:
                events.append((sequence, sequence.progress()))

    def _proposer(self, sequence: Sequence) -> Proposer | None:
        match sequence.request.speculate:
            case "ngram":
                return NGram(sampled=sequence.request.sampling.temperature > 0)
            case "draft":
                assert self._draft is not None
                return Draft(
                    self._draft, sequence.limit, self.network.vocab_size, lambda: cast(Sampler, sequence.sampler).fork()
                )
        return None

    def _land(self, flight: Flight, events: list[Delivery]) -> None:
        """Wait for a pass, make final what it appended, and say what it brought."""
        tokens = flight.land()
        now = time.perf_counter()
        rows = fed = 0
        for share in flight.shares:
            if share.phase == "decode":
                rows += 1
            else:
                fed += share.count
        seconds = now - max(self._landed, flight.started)
        if not flight.guesses:
            self._pace.took(rows, fed, seconds)
        if rows and not fed:
            self._guesses.controller.record(rows, flight.guesses, seconds, ahead=flight.ahead)
        self._landed = now
        row = 0
        for share in flight.shares:
            sequence = share.sequence
            chosen = tokens[row : row + share.count] if share.chooses else []
            row += len(chosen)
            if sequence.state == "finished":
                continue
            if share.chooses:
                with self._own_errors(sequence, events):
                    if sequence in flight.errors:
                        raise flight.errors[sequence]
                    events.append(self._chosen(share, chosen, flight))
                continue
            sequence.kv.commit(share.count)
            if share.phase == "prefill":
                self._prompted(sequence, events)
                if not rows and sequence.kv.committed == sequence.prefill_end:
                    mx.clear_cache()  # decoding needs none of what the chunks were computed in

    def _chosen(self, share: Share, chosen: list[int], flight: Flight) -> Delivery:
        """What a sequence's rows choose has been read: a token, and as many more as were guessed right."""
        sequence, guesses = share.sequence, share.guesses
        said = chosen[: 1 + agreed(chosen, guesses)]
        stop = next((place for place, token in enumerate(said) if token in sequence.request.stop_ids), None)
        if stop is not None:
            said = said[: stop + 1]
        sequence.kv.commit(len(said))
        source = None
        if guesses:
            sequence.kv.rollback()
            cast(Sampler, sequence.sampler).commit(len(said))
            sequence.guessed, source = 0, share.source
        sequence.tokens += said
        record = sequence.timeline.step_done(sequence.kv, flight.batch, len(said), len(guesses), source)
        values = flight.logprobs.get(sequence)
        if stop is not None:
            if not stop:
                return sequence, self._finish(sequence, "stop", said[0], record)
            sequence.stop_id = said.pop()
        sequence.said += len(said)
        read_values = None if values is None else tuple(read(each) for each in values[: len(said)])
        return sequence, Step(tuple(said), record, read_values)

    def _prompted(self, sequence: Sequence, events: list[Delivery]) -> None:
        """A chunk of a sequence's prompt is in the cache."""
        cache = sequence.kv
        if self._keeps or not self._generating:  # else nobody will ever begin like it
            self.kv.on_prefill(cache, sequence.tokens)
        if cache.committed > sequence.told:  # else it had stepped back and gets again what it had
            sequence.told = cache.committed
            events.append((sequence, sequence.progress()))
            sequence.timeline.prefilled()

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_id: int | None = None, record: StepRecord | None = None
    ) -> Finished:
        after = sequence.request.cancel.after
        if after is not None and sequence.said >= after:  # the answer may have ended in the middle of a step
            sequence.timeline.unsay(sequence.said - after + (sequence.stop_id is not None))
            sequence.said = after
        finished = Finished(reason, sequence.timeline.summary(sequence.cache, sequence.said), stop_id, record)
        self._end(sequence)
        return finished

    def _end(self, sequence: Sequence) -> None:
        """What a pass under way appends for it is a token of it: that entry stays, the token it chooses does not.

        Guesses behind it do not stay.
        """
        if sequence.cache is not None:
            sequence.cache.commit(sequence.cache.length - sequence.cache.committed - sequence.guessed)
            if sequence.guessed:
                sequence.cache.rollback()
        self._scheduler.remove(sequence)
        self._ended.append(sequence)

    @contextmanager
    def _own_errors(self, sequence: Sequence, events: list[Delivery]) -> Iterator[None]:
        """What is raised within is the sequence's own, and ends it alone."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or sequence.state == "finished":
                raise
            self._scheduler.remove(sequence)
            sequence.failed = True
            self._ended.append(sequence)
            events.append((sequence, Failed(expected(error))))

    def _put_away(self) -> None:
        """Keep or let go of the caches of those that ended."""
        for sequence in self._ended:
            if sequence.cache is not None and self.on_release is not None:
                self.on_release(sequence)
            if sequence.cache is not None and sequence.failed:
                sequence.cache.close()
            elif sequence.cache is not None:
                self.kv.release(sequence.cache, sequence.tokens)
            self._let_go(sequence)
        self._ended.clear()

    def _let_go(self, sequence: Sequence) -> None:
        sequence.cache = sequence.sampler = None  # whoever keeps the sequence keeps no memory
        sequence.proposer = None
        self._room.release(sequence)

    def _abandon(self) -> None:
        """After an error no cache is to be trusted."""
        for sequence in list(self._scheduler):
            self._scheduler.remove(sequence)
            self._ended.append(sequence)
        for sequence in self._ended:
            self._let_go(sequence)
        self._ended.clear()
        self.kv.clear()
        self._rest()

    def _work(self) -> None:
        """Begin, if nothing was to be done before."""
        if self._at_work is None:
            mx.reset_peak_memory()
            self._at_work = ExitStack()
            self._at_work.enter_context(wired(self._weights, self._held))

    def _rest(self) -> None:
        """Nothing is left to do: give memory back."""
        self._flight = None
        if self._at_work is None:
            return
        with self._at_work:
            self._at_work = None
            # clear_cache waits for the device with the interpreter lock held, which would stop every other thread for
            # the rest of the step that was built ahead: wait for that one without the lock first.
            mx.synchronize()
            self.kv.trim()
            mx.clear_cache()
            self._guesses.keep()
