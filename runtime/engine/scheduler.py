"""Who is served, and who gets how many tokens of the next pass. Bookkeeping only: no array, no clock.

Requests are admitted in the order they came, as soon as there is a place and room for their prompt; where K/V are
shared, not while a prompt that begins alike is being fed, but behind it. Every admitted sequence that decodes gets one
row of every pass; prompts share what `Pace` leaves them, the oldest first. Where room is short the youngest steps back:
its cache goes, and it is admitted again before any younger one, to be fed what it had and to go on where it was. The
oldest never steps back, so everyone's turn comes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.runtime.engine.chunk_budget import Pace
from headrace.runtime.engine.kv_budget import Room
from headrace.runtime.engine.prefill import chunk_end
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.ops import BLOCK, Phase

AGAIN = 16  # tokens at a time of what a sequence had said before it stepped back: as many rows as one may verify


@dataclass(frozen=True, slots=True)
class Share:
    """What a sequence gets of a pass: so many of its tokens are fed, and whether they choose what comes next.

    guesses: what may follow on a token that chooses, and is fed behind it (in `count`) to choose as well.
    """

    sequence: Sequence
    count: int
    phase: Phase
    chooses: bool
    guesses: tuple[int, ...] = ()
    source: str | None = None


class Scheduler:
    """Sequences between submission and end."""

    def __init__(self, room: Room, pace: Pace, most_running: int, *, shared: bool = False) -> None:
        self.waiting: deque[Sequence] = deque()  # oldest first, those that stepped back before all others
        self.running: list[Sequence] = []  # oldest first
        self._room = room
        self._pace = pace
        self._most_running = most_running
        self._shared = shared  # whether one begins with what others were fed
        self._stepping_back: Sequence | None = None  # as soon as no pass is under way that appends to its cache

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Submitted: it waits for its turn."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ended."""
        sequence.state = "finished"
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence is self._stepping_back:
            self._stepping_back = None

    def admit(self) -> list[Sequence]:
        """Those whose turn has come. They need caches."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._most_running and self._stepping_back is None:
            sequence = self.waiting[0]
            if self._shared and any(_brings(other, sequence) for other in self.running):
                break
            if not self._room.promise(sequence, len(sequence.tokens), spare=len(self.running)):
                break
            self.running.append(self.waiting.popleft())
            sequence.state = "prefill"
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Share]:
        """The next pass: first those that choose a token (of them, first those fed what the pass under way chooses)."""
        if self._stepping_back is not None and not self._stepping_back.pending:
            self._step_back(self._stepping_back)
        chained: list[Share] = []
        first: list[Share] = []
        again: list[Share] = []
        prompts: list[Sequence] = []
        for sequence in tuple(self.running):
            if sequence.state == "prefill":
                if not _prefilled(sequence):
                    prompts.append(sequence)
                    continue
                sequence.state = "decode"
            if sequence.state != "decode" or not sequence.remaining or not self._has_room(sequence):
                continue
            known = len(sequence.tokens) - sequence.kv.length
            if known > 1:  # what it had said before it stepped back
                again.append(Share(sequence, min(known - 1, AGAIN), "decode", chooses=False))
                continue
            (first if known else chained).append(Share(sequence, 1, "decode", chooses=True))
        decoding = [*chained, *first, *again]
        return decoding + self._chunks(prompts, beside=bool(decoding)) if prompts else decoding

    def extend(self, share: Share, guesses: tuple[int, ...], source: str) -> Share:
        """The same share with guesses behind its token; as it is, where there is no room for them."""
        sequence, count = share.sequence, share.count + len(guesses)
        if not guesses or count > sequence.remaining or not self._room.promise(sequence, sequence.kv.length + count):
            return share
        sequence.guessed = len(guesses)
        return replace(share, count=count, guesses=guesses, source=source)

    def preempt_youngest(self) -> None:
        """Preempt the youngest of several running sequences, as soon as no pass under way appends to its cache."""
        if len(self.running) < 2 or self._stepping_back is not None:
            return
        youngest = self.running[-1]
        if youngest.pending:
            self._stepping_back = youngest
        else:
            self._step_back(youngest)

    def _chunks(self, prompts: list[Sequence], beside: bool) -> list[Share]:
        budget = self._pace.budget(beside)
        chunks = []
        for sequence in prompts:
            if sequence.state != "prefill" or sequence is self._stepping_back or (sequence.marks and sequence.pending):
                continue
            done = sequence.kv.length
            count = min(budget, chunk_end(done, sequence.prefill_end, sequence.marks) - done)
            chunks.append(Share(sequence, count, "prefill", chooses=False))
            budget -= count
            if not budget:
                break
        return chunks

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether it may append an entry; if not, the youngest steps back, or will when its pass has landed."""
        if sequence is self._stepping_back:
            return False
        while not self._room.promise(sequence, sequence.kv.length + 1):
            if self._stepping_back is not None:
                return False
            youngest = self.running[-1]
            if youngest.pending:
                self._stepping_back = youngest
                return False
            self._step_back(youngest)
            if youngest is sequence:
                return False
        return True

    def _step_back(self, sequence: Sequence) -> None:
        self._stepping_back = None
        sequence.kv.close()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.state, sequence.cache = "preempted", None
        self._room.release(sequence)


def _brings(other: Sequence, sequence: Sequence) -> bool:
    """Whether blocks that the sequence begins with are just being fed to another: they will be there for both."""
    if other.state != "prefill":
        return False
    fed = other.kv.committed // BLOCK if other.cache else 0
    last = min(other.prefill_end, sequence.prefill_end) // BLOCK
    if fed >= last:
        return False
    end = (fed + 1) * BLOCK
    return other.tokens[:end] == sequence.tokens[:end]


def _prefilled(sequence: Sequence) -> bool:
    """Whether all of its prompt but the last token has been fed, so that its first step is next."""
    return sequence.kv.length >= sequence.prefill_end and not (sequence.marks and sequence.pending)
