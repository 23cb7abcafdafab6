"""The scheduler by itself, on sequences whose passes take no time: whatever comes, ends or lacks room."""

from collections import deque
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.prompt_chunks import BUDGET_STEP, SMALLEST, STRETCH, ChunkBudget
from headrace.runtime.engine.request import Request
from headrace.runtime.engine.scheduler import REFEED, ScheduledChunk, Scheduler
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.kv.cache import CHUNK, KVCache
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.metrics.telemetry import PassFacts

COST = StepCost(weight_bytes=1000, weight_flops=0, kv=[LayerKV(2, 10)])
LIMIT = 1500
ROOM = 6 * CHUNK
MOST = 4


class Served(RuleBasedStateMachine):
    """An engine without a network: passes under way land one step later, in which a few sequences end."""

    def __init__(self) -> None:
        super().__init__()
        self.room = KVBudget(COST, LIMIT, COST.kv_bytes(ROOM))
        self.scheduler = Scheduler(self.room, ChunkBudget(), MOST)
        self.flight: list[ScheduledChunk] = []
        self.submitted: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.said: dict[Sequence, list[int]] = {}
        self.fed: dict[Sequence, list[int]] = {}  # tokens in the cache it has now
        self.first_admissions: list[Sequence] = []

    @rule(prompt=st.integers(1, 700), tokens=st.integers(1, 600))
    def submit(self, prompt: int, tokens: int) -> None:
        timeline: Any = SimpleNamespace()
        sequence = Sequence(Request(range(prompt), tokens), self.room.limit, timeline)
        self.submitted.append(sequence)
        self.said[sequence] = []
        self.scheduler.waiting.append(sequence)

    @precondition(lambda self: self.scheduler)
    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        """Cancelled, or stopped by a token."""
        left = list(self.scheduler)
        self._end(left[which % len(left)])

    @rule(steps=st.integers(1, 200))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        for sequence in list(self.scheduler.running):
            if not sequence.remaining and not sequence.pending:
                self._end(sequence)
        for sequence in self.scheduler.admit():
            sequence.cache = KVCache(LIMIT)
            self.fed[sequence] = []
            if sequence not in self.first_admissions:
                self.first_admissions.append(sequence)
        shares = self.scheduler.plan()
        landing = self.flight
        self._check(shares, landing)
        for share in shares:
            cache = share.sequence.cache
            cache.advance(share.count)
            assert cache.length <= share.sequence.reserved
        self.flight = shares
        for share in landing:
            self._land(share)

    def _land(self, share: ScheduledChunk) -> None:
        sequence = share.sequence
        if sequence.state == "finished":
            return
        assert sequence.state != "preempted"  # nobody steps back from a pass under way
        cache = sequence.cache
        self.fed[sequence] += sequence.tokens[cache.committed : cache.committed + share.count]
        cache.commit(share.count)
        if share.chooses:
            token = 1000 + len(self.said[sequence])
            self.said[sequence].append(token)
            sequence.tokens.append(token)

    def _check(self, shares: list[ScheduledChunk], landing: list[ScheduledChunk]) -> None:
        sequences = [share.sequence for share in shares]
        assert len(set(sequences)) == len(sequences) <= MOST
        kinds = [(not share.chooses, share.phase == "prefill") for share in shares]
        assert kinds == sorted(kinds)  # those that choose, those fed again, chunks of prompts
        choosing = [share.sequence for share in shares if share.chooses]
        chained = [sequence for sequence in choosing if sequence.cache.length == len(sequence.tokens)]
        before = [share.sequence for share in landing if share.chooses]
        assert chained == choosing[: len(chained)]
        assert set(chained) <= set(before)
        for share in shares:
            at = share.sequence.cache.length
            tokens = share.sequence.tokens
            if share.phase == "prefill":
                assert at + share.count <= share.sequence.prefill_end
            else:
                assert at >= share.sequence.prefill_end
                assert share.chooses == (at >= len(tokens) - 1)
                assert at + share.count < len(tokens) + share.chooses * 2
                assert 1 <= share.count <= (1 if share.chooses else REFEED)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        sequence.cache = None
        self.room.release(sequence)
        self.ended.append(sequence)

    @invariant()
    def everyone_is_somewhere_once(self) -> None:
        everywhere = [*self.scheduler.running, *self.scheduler.waiting, *self.ended]
        assert sorted(map(id, everywhere)) == sorted(map(id, self.submitted))

    @invariant()
    def room_is_kept(self) -> None:
        assert self.room.used == sum(COST.kv_bytes(sequence.reserved) for sequence in self.submitted)
        assert self.room.used <= self.room.total
        assert all(not sequence.reserved for sequence in (*self.ended, *self.scheduler.waiting))

    @invariant()
    def the_order_is_kept(self) -> None:
        arrival = {sequence: number for number, sequence in enumerate(self.submitted)}
        order = [arrival[sequence] for sequence in self.scheduler]
        assert order == sorted(order)
        admitted = [arrival[sequence] for sequence in self.first_admissions]
        assert admitted == sorted(admitted)

    @invariant()
    def what_is_in_a_cache_is_the_sequence(self) -> None:
        for sequence in self.scheduler.running:
            assert self.fed[sequence] == sequence.tokens[: sequence.cache.committed]

    def teardown(self) -> None:
        """Nobody starves: all of them end, with as many tokens as there is room for."""
        cancelled = set(self.ended)
        steps = 0
        while self.scheduler:
            self._step()
            steps += 1
            assert steps < 20_000
        for sequence in self.submitted:
            if sequence not in cancelled:
                most = self.room.limit - sequence.prefill_end
                assert len(self.said[sequence]) == min(most, sequence.request.max_tokens or most)
        assert self.room.used == 0


def test_a_sequence_reserves_at_most_its_context_limit() -> None:
    assert LIMIT % CHUNK
    room = KVBudget(COST, LIMIT, COST.kv_bytes(LIMIT))
    timeline: Any = SimpleNamespace()
    sequence = Sequence(Request(range(9), 5), LIMIT, timeline)
    assert room.reserve(sequence, LIMIT - 1)
    assert (sequence.reserved, room.used) == (LIMIT, room.total)


def test_lowering_the_kv_budget_keeps_reservations_and_one_full_context() -> None:
    room = KVBudget(COST, LIMIT, COST.kv_bytes(LIMIT * 4))
    timeline: Any = SimpleNamespace()
    sequences = [Sequence(Request(range(9), 5), LIMIT, timeline) for _ in range(3)]
    assert all(room.reserve(sequence, LIMIT) for sequence in sequences[:2])
    room.limit_total(0)
    assert (room.total, room.used) == (COST.kv_bytes(LIMIT), 2 * COST.kv_bytes(LIMIT))
    assert not room.reserve(sequences[2], 1)
    for sequence in sequences[:2]:
        room.release(sequence)
    assert room.reserve(sequences[2], LIMIT)


Served.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestServed = Served.TestCase


def test_prompts_are_prefilled_oldest_first_within_the_chunk_budget() -> None:
    room = KVBudget(COST, LIMIT, COST.kv_bytes(LIMIT * 4))
    pace = ChunkBudget()
    pace.record(decoding=0, prompt_tokens=512, seconds=0.4)
    scheduler = Scheduler(room, pace, max_running=8)
    timeline: Any = SimpleNamespace()
    sequences = [Sequence(Request(range(301), 5), LIMIT, timeline) for _ in range(3)]
    for sequence in sequences:
        scheduler.waiting.append(sequence)
        sequence.cache = KVCache(LIMIT)
    scheduler.admit()
    assert [(share.sequence, share.count) for share in scheduler.plan()] == [(sequences[0], 300), (sequences[1], 212)]


def test_a_prompt_chunk_stretches_decode_steps_up_to_the_limit() -> None:
    pace = ChunkBudget()
    assert pace.budget(with_decoding=True) == SMALLEST
    pace.record(decoding=0, prompt_tokens=400, seconds=0.4)  # 1 ms a token
    for _ in range(50):
        pace.record(decoding=4, prompt_tokens=0, seconds=0.1)
    assert abs(pace.budget(with_decoding=True) - (STRETCH - 1) * 100) <= BUDGET_STEP
    for _ in range(50):
        pace.record(decoding=4, prompt_tokens=100, seconds=0.1 + 100 * 0.002)  # small chunks cost twice as much
    assert abs(pace.budget(with_decoding=True) - (STRETCH - 1) * 50) <= BUDGET_STEP


def test_queue_time_and_prefill_time_are_separate() -> None:
    now = iter([10.0, 12.0, 15.0, 16.0])
    timeline = Timeline(cost=COST, prompt_tokens=9, clock=lambda: next(now))
    timeline.admitted(reused_tokens=3)
    timeline.prefilled()
    cache: Any = SimpleNamespace(committed=9, committed_bytes=180, allocated_bytes=200)
    assert timeline.step_done(cache, PassFacts(3)).batch == 3
    summary = timeline.summary(cache, 1)
    assert (summary.queue_s, summary.prefill_s, summary.first_step_s) == (2.0, 3.0, 1.0)
    assert (summary.reused_tokens, summary.prefill_tokens) == (3, 5)


def test_a_request_that_never_ran_has_no_figures() -> None:
    timeline = Timeline(cost=COST, prompt_tokens=9, clock=iter(map(float, deque(range(9)))).__next__)
    summary = timeline.summary(None, 0)
    assert (summary.steps, summary.kv_cache_bytes, summary.prefill_tokens) == (0, 0, 0)
