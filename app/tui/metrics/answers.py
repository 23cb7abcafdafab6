"""Metrics of the answers of a turn, one or several: a row for each, and totals.

A pass reads the weights once for all its sequences, so a token's share is weight bytes / batch size. Units are those of
`runtime.metrics.telemetry`.

`LiveMetrics` has one `TurnAnswers` for each turn: a chat's single answer, several (/again, /compare), or the endless
turn of `headrace top`. tests/tui/test_several_metrics.py guards this.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct, field

from headrace.app.engine.events import (
    Abandoned,
    AnswerEvent,
    BatchStatus,
    ContextFull,
    Delta,
    Died,
    Done,
    Event,
    Failed,
    Prefill,
)
from headrace.app.tui.metrics.rates import NOW_S, StepTotals
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import PoolStats, StepRecord

RowPhase = Literal["waiting", "prefill", "decode", "preempted", "done", "stopped", "failed"]

OVER: tuple[RowPhase, ...] = ("done", "stopped", "failed")  # phases of answers that have ended
STEPS_KEPT = 4096  # that the chart can look back on
_WORDS = 120  # characters of a text's end
_ANY = 0  # stands for the id of a turn's only answer


class TokenCount(NamedTuple):
    """Tokens of all answers of a turn at one time. at: of the engine's clock, seconds."""

    at: float
    tokens: int


class AnswerRow(Struct):
    """One sequence: an answer alone, or one of several.

    number: from 1, as on the screen.
    prefill_done, prefill_total, reused: tokens of its prompt, see `Prefill`.
    tokens: of the answer so far.
    ttft_s: time to first token; None before it.
    records: the latest steps.
    totals: of all steps.
    words: the end of its text, as the model generated it.
    """

    number: int
    phase: RowPhase = "waiting"
    prefill_done: int = 0
    prefill_total: int = 0
    reused: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    totals: StepTotals = field(default_factory=StepTotals)
    words: str = ""

    @property
    def dropped_s(self) -> float:
        """Seconds of decode steps that `records` no longer has."""
        kept_s = sum(record.latency_s for record in self.records if record.index)
        return max(0.0, self.totals.seconds - kept_s)

    def prefilled(self, done: int, total: int, reused: int) -> None:
        """Note the progress of the prefill; see `Prefill`."""
        self.prefill_done = done
        self.prefill_total = total
        self.reused = reused

    def stepped(self, records: Iterable[StepRecord], cost: StepCost | None) -> None:
        """Add steps. cost: for their FLOPs."""
        for record in records:
            self.records.append(record)
            self.tokens += record.tokens
            self.totals.add(record, cost)


class TurnAnswers:
    """The answers of one turn.

    rows: in the order of their requests.
    batches: sequences of each pass.
    cost: for the FLOPs of steps.
    """

    def __init__(
        self, ids: Sequence[int] | None = None, cost: StepCost | None = None, max_rows: int | None = None
    ) -> None:
        """Begin the turn.

        ids: of several answers; None: the turn has one answer, of any id.
        max_rows: rows of an endless turn, which any answer joins; None: the turn has the answers `ids`.
        """
        self.is_several = ids is not None
        self._rows = {generation: AnswerRow(number) for number, generation in enumerate(ids or (), 1)}
        if ids is None:
            self._rows = {_ANY: AnswerRow(1)}
        self._max_rows = max_rows
        self.batches: deque[int] = deque(maxlen=STEPS_KEPT)
        self.blocks: PoolStats | None = None  # of the K/V pool; None without one
        self.kv_used_bytes = 0  # reserved by the answers
        self.kv_room_bytes = 0  # that may be reserved
        self.weight_bytes = 0  # of a step
        self._weights_read = 0.0  # bytes: of each step, its share of the pass
        self._output_tokens = 0  # of the steps in `_weights_read`
        self.cost = cost
        self._totals = StepTotals()  # of several
        self._counts: deque[TokenCount] = deque()  # those of the last second, and the one before it
        self._first_count: TokenCount | None = None  # the first one with a token

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the generations."""
        return tuple(self._rows)

    @property
    def rows(self) -> list[AnswerRow]:
        return list(self._rows.values())

    @property
    def totals(self) -> StepTotals:
        """Totals of all steps."""
        return self._totals if self.is_several else self._rows[_ANY].totals

    @property
    def is_endless(self) -> bool:
        """True if any answer joins the turn, as those of a server."""
        return self._max_rows is not None

    @property
    def longest(self) -> Sequence[StepRecord]:
        """Steps of the sequence that has most of them, of those that run if one has any."""
        rows = [row for row in self._rows.values() if row.records]
        running = [row for row in rows if row.phase not in OVER]
        return max((row.records for row in running or rows), key=len, default=())

    @property
    def over(self) -> bool:
        """True once every answer has ended."""
        return all(row.phase in OVER for row in self._rows.values())

    @property
    def growing(self) -> int:
        """Number of answers that have not ended."""
        return sum(row.phase not in OVER for row in self._rows.values())

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self._rows.values())

    @property
    def rate_now(self) -> float | None:
        """Total tokens per second over the last second."""
        if not self._counts:
            return None
        return _rate(self._counts[0], self._counts[-1])

    @property
    def rate_average(self) -> float | None:
        """Total tokens per second from the turn's first token on."""
        if self._first_count is None or not self._counts:
            return None
        return _rate(self._first_count, self._counts[-1])

    @property
    def rate_each(self) -> float | None:
        """Mean tokens per second of one answer."""
        rates = [rate for row in self._rows.values() if (rate := row.totals.tokens_per_second) is not None]
        if not rates:
            return None
        return sum(rates) / len(rates)

    @property
    def weight_bytes_per_token(self) -> float | None:
        """Weight bytes read per token, over the turn."""
        return self._weights_read / self._output_tokens if self._output_tokens else None

    def has(self, event: Event) -> bool:
        """Return True for an event about one of the answers, or about all."""
        # An endless turn takes any answer. A single answer comes before its id is known here.
        if isinstance(event, AnswerEvent) and (self._max_rows is not None or not self.is_several):
            return event.id is not None
        if isinstance(event, BatchStatus):
            return self.is_several
        return getattr(event, "id", None) in self._rows

    def _row(self, generation: int) -> AnswerRow:
        """Return an answer's row, a new one in an endless turn; the oldest that are over make room."""
        if not self.is_several:
            return self._rows[_ANY]
        if generation not in self._rows:
            over = [number for number, row in self._rows.items() if row.phase in OVER]
            for number in over[: max(0, len(self._rows) + 1 - (self._max_rows or 0))]:
                del self._rows[number]
            self._rows[generation] = AnswerRow(generation)
        return self._rows[generation]

    def take(self, event: Event) -> None:
        """Take in an event about the answers."""
        match event:
            case BatchStatus():
                self._served(event)
            case Died():
                for row in self._rows.values():
                    if row.phase not in OVER:
                        row.phase = "failed"
            case Prefill():
                row = self._row(event.id)
                row.phase = "prefill"
                row.prefilled(event.done, event.total, event.reused)
            case Delta() if event.parts:
                row = self._row(event.id)
                row.phase = "decode"
                if row.ttft_s is None:
                    row.ttft_s = event.ttft_s
                row.words = (row.words + event.text)[-_WORDS:]
                row.stepped(event.records, self.cost)
                if self.is_several:
                    self._add_to_totals(event.records)
            case Done():
                row = self._row(event.id)
                summary = event.end.summary
                row.phase = "stopped" if event.end.reason == "cancelled" else "done"
                row.prefilled(summary.prefill_tokens, summary.prefill_tokens, summary.reused_tokens)
                row.tokens = summary.completion_tokens  # a step that ended it gave none
            case Failed() | ContextFull() | Abandoned():
                if event.id is not None:
                    self._row(event.id).phase = "failed"

    def _add_to_totals(self, records: Sequence[StepRecord]) -> None:
        """Count steps of one of several answers."""
        for record in records:
            self.weight_bytes = record.weight_bytes
            self._weights_read += record.weight_bytes / max(1, record.batch)
            self._output_tokens += record.tokens
            self._totals.add(record, self.cost, whole_batch=True)

    def _served(self, served: BatchStatus) -> None:
        """Take in the engine's report on the batch: states, passes, memory, and the tokens so far."""
        for generation, state in served.states.items():
            row = self._row(generation) if self._max_rows else self._rows.get(generation)
            if row is not None and row.phase not in OVER and state != "finished":
                row.phase = state
        self.batches.extend(served.batches)
        self.blocks = served.blocks
        self.kv_used_bytes = served.kv_used_bytes
        self.kv_room_bytes = served.kv_room_bytes
        count = TokenCount(served.at, served.tokens)
        if self._counts and count.tokens < self._counts[-1].tokens:  # the engine was idle meanwhile, and began anew
            self._counts.clear()
            self._first_count = None
        if self._first_count is None and count.tokens:
            self._first_count = count
        self._counts.append(count)
        while len(self._counts) > 2 and count.at - self._counts[1].at >= NOW_S:
            self._counts.popleft()


def _rate(since: TokenCount, now: TokenCount) -> float | None:
    """Return the tokens per second between two counts; None if no time has passed."""
    if now.at <= since.at:
        return None
    return (now.tokens - since.tokens) / (now.at - since.at)
