"""Admission, token budgets and preemption. Bookkeeping only: no array, no clock.

Requests are admitted in order of arrival, if a place and K/V memory for their prompt are free. Where a cache is copied
to grow, memory for output is reserved as well, unless it is short. With prefix sharing, a request waits while a running
prompt with the same beginning is being fed. A decoding sequence gets one row of every pass, or several to feed tokens
again after a preemption or a rollback, or none while memory is short. Prompts share `ChunkBudget`, the oldest first. If
memory is short, the youngest sequence is preempted: its cache is released, and it is admitted again before younger ones
and fed its tokens again. The oldest is never preempted.

`Engine` calls `admit`, then `plan`, once a step; `Drafting` adds draft tokens by `extend`, and `Ending` calls `remove`.
The order of the chunks that `plan` returns is part of its contract: `decode.start` and `BuiltPass` rely on it.
tests/runtime/engine/test_scheduler.py runs it without a network.
"""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.prompt_chunks import ChunkBudget, chunk_end
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.ops import BLOCK, Phase
from headrace.runtime.speculation.proposer import MAX_DRAFT

REFEED = MAX_DRAFT + 1  # output tokens of a preempted sequence that one pass feeds again: the most rows of a sequence


class ScheduledChunk(Struct, frozen=True):
    """One sequence's part of a pass: `count` tokens.

    phase: of its K/V entries; a prompt's are of "prefill".
    chooses: the tokens choose the next ones.
    draft_tokens: the last tokens of `count`, if there are any.
    source: proposer of the draft tokens.
    num_refed: first tokens of `count` that were fed before and rolled back; they choose none.
    """

    sequence: Sequence
    count: int
    phase: Phase
    chooses: bool
    draft_tokens: tuple[int, ...] = ()
    source: str | None = None
    num_refed: int = 0

    @property
    def rows(self) -> int:
        """Tokens that choose, if it chooses."""
        return self.count - self.num_refed

    @property
    def output(self) -> bool:
        """True if the output of the layers is used: for tokens, or by a proposer."""
        return self.chooses or self.drafts

    @property
    def drafts(self) -> bool:
        """True if a proposer of the sequence drafts from hidden states."""
        return self.sequence.mtp is not None


def mean_context(chunks: list[ScheduledChunk]) -> int:
    """Return the mean cache entries of the sequences, rounded down; 0 without chunks."""
    return sum(chunk.sequence.kv.length for chunk in chunks) // max(1, len(chunks))


class Scheduler:
    """All sequences between submission and end.

    budget: memory for K/V.
    chunk_budget: prompt tokens of a pass.
    max_running: concurrent sequences.
    shares_prefixes: a sequence can begin with a running one's entries.
    reserved_output: tokens of output for which memory is reserved at admission, if it is free.
    """

    def __init__(
        self,
        budget: KVBudget,
        chunk_budget: ChunkBudget,
        max_running: int,
        *,
        shares_prefixes: bool = False,
        reserved_output: int = 0,
    ) -> None:
        self.waiting: deque[Sequence] = deque()  # oldest first, preempted ones before all others
        self.running: list[Sequence] = []  # oldest first
        self._budget = budget
        self._chunk_budget = chunk_budget
        self._max_running = max_running
        self._shares_prefixes = shares_prefixes
        self._reserved_output = reserved_output
        self._preempting: Sequence | None = None  # as soon as no in-flight pass appends to its cache

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence."""
        sequence.state = "finished"
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence is self._preempting:
            self._preempting = None

    def admit(self) -> list[Sequence]:
        """Admit waiting sequences, and return them. They need caches."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_running and self._preempting is None:
            sequence = self.waiting[0]
            # It waits for the blocks that the other is just computing, and then begins with them.
            if self._shares_prefixes and any(_is_feeding_prefix_of(other, sequence) for other in self.running):
                break
            tokens = len(sequence.tokens)
            spare = len(self.running)  # each running sequence may need another chunk of entries soon
            with_output = max(tokens, len(sequence.request.prompt) + min(sequence.max_output, self._reserved_output))
            # With room for output if that is free, else for the tokens that there are.
            if not any(self._budget.reserve(sequence, entries, spare) for entries in (with_output, tokens)):
                break
            self.running.append(self.waiting.popleft())
            sequence.state = "prefill"
            if self._shares_prefixes and self.waiting:
                # Recurrent state is shared at marks only: one is set where the next prompt departs.
                common = common_prefix(sequence.tokens, self.waiting[0].tokens)
                if common >= BLOCK:
                    sequence.branch_point = common
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[ScheduledChunk]:
        """Schedule the next pass, and return its chunks. Reserves memory for them, and may preempt sequences.

        Order: chunks that choose and are fed the in-flight pass's tokens, others that choose, output that is fed again,
        prompts.
        """
        if self._preempting is not None and not self._preempting.pending:
            self._preempt(self._preempting)
        chained: list[ScheduledChunk] = []  # fed a token that the in-flight pass chooses
        choosing: list[ScheduledChunk] = []  # fed known tokens, and choose
        refeeding: list[ScheduledChunk] = []  # fed output once more, and choose none
        prompts: list[Sequence] = []
        for sequence in tuple(self.running):
            if sequence.state == "prefill":
                if not _prefilled(sequence):
                    prompts.append(sequence)
                    continue
                sequence.state = "decode"
            if sequence.state != "decode" or not sequence.remaining or not self._reserve_entry(sequence):
                continue
            known = len(sequence.tokens) - sequence.kv.length  # tokens without an entry; 0: the next one is in flight
            # A rejected draft took accepted entries with it, back to a mark: all are fed in this pass, which chooses.
            if 1 < known <= REFEED and sequence.kv.needs_marks:
                choosing.append(ScheduledChunk(sequence, known, "decode", chooses=True, num_refed=known - 1))
                continue
            # Its output before it was preempted, over several passes; its last token chooses in the pass after them.
            if known > 1:
                refeeding.append(ScheduledChunk(sequence, min(known - 1, REFEED), "decode", chooses=False))
                continue
            chunk = ScheduledChunk(sequence, 1, "decode", chooses=True)
            if known:
                choosing.append(chunk)
            else:  # its token is in flight
                chained.append(chunk)
        decoding = [*chained, *choosing, *refeeding]
        return [*decoding, *self._chunks(prompts, with_decoding=bool(decoding))]

    def extend(self, chunk: ScheduledChunk, draft_tokens: tuple[int, ...], source: str) -> ScheduledChunk:
        """Return the chunk with draft tokens, or unchanged if there is no room for them."""
        sequence = chunk.sequence
        count = chunk.count + len(draft_tokens)
        if (
            not draft_tokens
            or count - chunk.num_refed > sequence.remaining
            or not self._budget.reserve(sequence, sequence.kv.length + count)
        ):
            return chunk
        sequence.draft_entries = len(draft_tokens)
        return replace(chunk, count=count, draft_tokens=draft_tokens, source=source)

    def preempt_youngest(self) -> None:
        """Preempt the youngest of several running sequences, as soon as no in-flight pass appends to its cache."""
        if len(self.running) < 2 or self._preempting is not None:
            return
        youngest = self.running[-1]
        if youngest.pending:
            self._preempting = youngest
        else:
            self._preempt(youngest)

    def _chunks(self, prompts: list[Sequence], with_decoding: bool) -> list[ScheduledChunk]:
        """Return chunks of the prompts, within the budget of a pass."""
        budget = self._chunk_budget.budget(with_decoding)
        chunks = []
        for sequence in prompts:
            # A mark needs a cache with nothing pending: the next chunk waits for the one in flight.
            if sequence.state != "prefill" or sequence is self._preempting or (sequence.marks and sequence.pending):
                continue
            done = sequence.kv.length
            end = chunk_end(done, sequence.prefill_end, sequence.marks, sequence.branch_point)
            count = min(budget, end - done)
            chunks.append(ScheduledChunk(sequence, count, "prefill", chooses=False))
            budget -= count
            if not budget:
                break
        return chunks

    def _reserve_entry(self, sequence: Sequence) -> bool:
        """Reserve one more entry, preempting the youngest if necessary; return whether the sequence may append now."""
        if sequence is self._preempting:
            return False
        while not self._budget.reserve(sequence, sequence.kv.length + 1):
            if self._preempting is not None:
                return False
            youngest = self.running[-1]
            if youngest.pending:
                self._preempting = youngest
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Release a sequence's cache and reservation now, and queue it before all that never ran."""
        self._preempting = None
        sequence.kv.close()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.state = "preempted"
        sequence.cache = None
        self._budget.release(sequence)


def _is_feeding_prefix_of(other: Sequence, sequence: Sequence) -> bool:
    """Return whether `other` is being fed blocks that the sequence begins with."""
    if other.state != "prefill":
        return False
    num_fed = 0  # blocks; none in the step of its admission, when it has no cache yet
    if other.cache is not None:
        num_fed = other.cache.committed // BLOCK
    num_common = min(other.prefill_end, sequence.prefill_end) // BLOCK  # whole blocks that both prompts could share
    if num_fed >= num_common:
        return False
    end = (num_fed + 1) * BLOCK  # of the block that `other` is fed now
    return other.tokens[:end] == sequence.tokens[:end]


def _prefilled(sequence: Sequence) -> bool:
    """Return whether prefill is complete."""
    return sequence.kv.length >= sequence.prefill_end and not (sequence.marks and sequence.pending)
