"""Live metrics of the decode view, gathered from engine events. No widgets.

`version` grows with every change, so that views redraw only then; `frozen()` is a deep copy. Bytes are computed from
shapes (see `runtime.metrics.telemetry`); times are seconds.

The poller feeds it (`take`, `set_load`, `set_context`); sections and meters read its properties and change nothing. A
figure is computed in one property here, from `StepTotals` or the functions of `figures.py`, for all that show it. New
state of a turn is set in `_begin_turn`, all other state in `__init__`. tests/tui/test_parts.py lists what outlives a
turn, and fails for any other.

Guards: tests/tui/test_charts.py, test_step_streams.py and test_several_metrics.py, too.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from headrace.app.answer.answer_steps import StepText
from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.answer.sentence import CPU_BUSY, StepFigures, cpu_phrase
from headrace.app.engine.events import (
    Abandoned,
    ContextFull,
    Delta,
    Died,
    Done,
    Event,
    Failed,
    LoadProgress,
    PeakMeasured,
    Prefill,
    PrefixCached,
    Ready,
    SlowFirstPass,
)
from headrace.app.engine.model_card import ModelCard
from headrace.app.tui.metrics.answers import STEPS_KEPT, AnswerRow, TurnAnswers
from headrace.app.tui.metrics.facts import (
    CacheFill,
    FirstToken,
    MachineFacts,
    MeasuredPrefill,
    ModelFacts,
    TurnFigures,
    facts,
    with_peaks,
)
from headrace.app.tui.metrics.figures import MIN_STEPS, Parts, StepTimes, Trail, step_bytes, step_times
from headrace.app.tui.metrics.rates import DecodeHistory, StepTotals, TurnEnergy, current_totals
from headrace.runtime.metrics.telemetry import MBU, Percentiles, StepRecord, Summary, mbu

if TYPE_CHECKING:  # the chat's first frame does not import them
    from headrace.runtime.engine.request import Finished
    from headrace.runtime.machine.machine_load import MachineLoad

LivePhase = Literal["start", "load", "failed", "prefill", "decode", "idle", "dead"]
"""State of the engine, for the view.

    start             before the first event
    load, failed      a model is being loaded; it could not be, and there is none
    idle              a model is loaded, and no answer is being computed
    prefill, decode   of the turn; of several answers, decode once one of them decodes
    dead              the engine's process has ended
"""

_CONTENDED_SAMPLES = 2  # in a row: one alone may be a program that starts


class LiveMetrics:
    """Everything the decode view draws."""

    def __init__(self) -> None:
        self.version = 0
        self.phase: LivePhase = "start"
        self.machine = MachineFacts()
        self.model = ModelFacts()
        self.load_stage = ""
        self.load_share: float | None = None
        self._prefill = Prefill(0, 0, 0, 0)  # the latest; a turn begins with its own
        self.fill = CacheFill()
        self.reuse: PromptReuse | None = None
        """Reuse of the turn's prompt, or of the next one once its prefetch met a miss: so a turn's end keeps it."""
        self.first_pass: SlowFirstPass | None = None
        """The latest report of the model's first pass, while it is slow."""
        self.context = 0
        """Tokens of the conversation, in the cache or not."""
        self.turns: list[TurnFigures] = []
        self.history = DecodeHistory()  # of this model
        self.load: MachineLoad | None = None
        """Load of the machine, at the latest sample."""
        self.energy = TurnEnergy()
        self._contended_samples = 0  # samples in a row with contention
        self.prefill: MeasuredPrefill | None = None  # the latest one long enough to measure
        self._begin_turn()
        self._fed = False  # nothing was asked yet

    def _begin_turn(self) -> None:
        """Set all that is of one turn; facts on machine and model stay, and the history of turns."""
        self.answers = TurnAnswers(cost=self.model.cost)
        """The answers of the latest turn."""
        self.first_token: FirstToken | None = None
        self.texts: list[StepText] = []
        """Text of each step of the latest turn; its records may come later."""
        self.prefetched = 0
        """Prompt tokens of the turn that were computed before it was sent."""
        self.busy_steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        """Steps while other programs used the CPUs."""
        self._since_sample: deque[StepRecord] = deque(maxlen=STEPS_KEPT)  # steps since the latest sample of the load
        self.trail = Trail()
        self._final: Summary | None = None  # once the turn is over
        self._machine_at_end: MachineFacts | None = None  # once the turn is over: its limits no longer change
        self.energy.begin_turn()
        self._fed = True  # a prompt was computed since the latest sample, as it is now

    # -- fed by the chat -------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """Take in events of the engine, in order."""
        for event in events:
            match event:
                case LoadProgress():
                    share = None
                    if event.total:
                        share = event.done / event.total
                    self.loading(event.stage, share)
                case Ready():
                    self.ready(*facts(event.card))
                case PeakMeasured():
                    self.machine = with_peaks(self.machine, event.peak.gb_s, event.compute_flops, event.memory_gb_s)
                case Failed(id=None):  # no model is loaded
                    self.phase = "failed"
                    self.model = ModelFacts()
                    self.fill = CacheFill()
                case PrefixCached():
                    self._prefix_cached(event)
                case SlowFirstPass():
                    self.first_pass = event
                case Prefill():
                    # The chat announces a turn of several answers (`begin_batch`). One of a single answer begins with
                    # its first prefill.
                    begins = not self.answers.is_several and (event.done == 0 or self.phase == "idle")
                    if begins or not self.answers.has(event):
                        self.submitted()
                    self._answered(event)
                case Died():
                    self.answers.take(event)
                    self.phase = "dead"
                case _ if self.answers.has(event):
                    self._answered(event)
                case _:
                    continue
            self._changed()

    def _answered(self, event: Event) -> None:
        """Take in an event about the answers of the turn."""
        self.first_pass = None
        self.answers.take(event)
        if not self.answers.is_several:
            self._one_answered(event)
        if isinstance(event, Delta):
            self._since_sample.extend(event.records)
        self.trail.add(self.answers.totals)
        if any(row.phase == "decode" for row in self.answers.rows):
            self.phase = "decode"
        elif not self.answers.over:
            self.phase = "prefill"
        elif self.phase in ("prefill", "decode"):  # not while a model is loaded
            self.phase = "idle"
        # The figures of an ended turn stay those of the limits that were known at its end.
        if self.answers.over and self.answers.is_several:
            self._machine_at_end = self._machine_at_end or self.machine

    def _one_answered(self, event: Event) -> None:
        """Take in what the view shows of a turn with one answer alone."""
        match event:
            case Prefill():
                self._prefill = event
                if event.reuse is not None:
                    self.reuse = event.reuse
                    self.prefetched = event.reuse.prefetched
            case Delta():
                self.texts += event.steps
                if event.records:
                    last = event.records[-1]
                    self.history.add(event.records)
                    self.fill = CacheFill(last.context, last.kv_used_bytes, last.kv_allocated_bytes)
                if event.ttft_s is not None:
                    self._first_text(event.ttft_s)
            case Done():
                self._finished(event.end)
            case ContextFull() | Failed() | Abandoned():
                self.history.end_turn()

    def loading(self, stage: str, share: float | None) -> None:
        """Note load progress. share: 0 to 1, None if unknown."""
        self.phase = "load"
        self.load_stage = stage
        self.load_share = share
        self._changed()

    def ready(self, model: ModelFacts, machine: MachineFacts) -> None:
        """Note that a model is loaded."""
        self.phase = "idle"
        self.model = model
        self.machine = machine
        self.first_pass = None
        self.fill = CacheFill()
        self.answers.cost = model.cost
        self.history = DecodeHistory()
        self._changed()

    def use_model(self, card: ModelCard, known: MachineFacts) -> None:
        """Start the metrics of a loaded model. known: facts on the machine, perhaps measured since it was loaded."""
        model, machine = facts(card)
        if machine.measured_gb_s is None:
            machine = known
        self.ready(model, machine)

    def submitted(self) -> None:
        """Begin the next turn."""
        self.phase = "prefill"
        self._begin_turn()
        self._changed()

    def begin_batch(self, ids: Sequence[int], max_rows: int | None = None) -> None:
        """Begin a turn of several answers. max_rows: see `TurnAnswers`."""
        self.submitted()
        self.answers = TurnAnswers(ids, self.model.cost, max_rows)
        self.phase = "prefill" if ids else "idle"

    def set_turns(self, turns: Sequence[TurnFigures]) -> None:
        """Replace the turns, after one of several answers was taken."""
        self.turns = list(turns)
        self._changed()

    def session_changed(self, turns: Sequence[TurnFigures]) -> None:
        """Replace the turns and forget the current one, after another session was opened."""
        self.turns = list(turns)
        self.fill = CacheFill()
        self.reuse = None
        self._begin_turn()
        self._changed()

    def _first_text(self, ttft_s: float) -> None:
        """Note the time to first token. What remains of it is prefill, unless the engine told the time of that."""
        steps = self.answer.records
        step_s = 0.0
        if steps and steps[0].index == 0:
            step_s = steps[0].latency_s
        waited_s = self._prefill.waited_s
        tokenize_s = self._prefill.tokenize_s
        rest_s = max(0.0, ttft_s - waited_s - tokenize_s - step_s)
        prefill_s = rest_s
        if self._prefill.prefill_s is not None:
            prefill_s = min(self._prefill.prefill_s, rest_s)
        self.first_token = FirstToken(ttft_s, waited_s, tokenize_s, prefill_s, step_s, rest_s=rest_s - prefill_s)

    def set_context(self, tokens: int) -> None:
        """Set the tokens of the conversation."""
        if tokens != self.context:
            self.context = tokens
            self._changed()

    def _prefix_cached(self, cached: PrefixCached) -> None:
        """Note the cache after a prefetch. Its reuse is that of the next prompt, as far as it is known."""
        self.first_pass = None
        self.fill = CacheFill(cached.tokens, cached.used_bytes, cached.allocated_bytes, cached.shared_blocks)
        self._fed = True
        if cached.reuse is not None and (cached.reuse.difference is not None or cached.reuse.dropped):
            self.reuse = cached.reuse

    def _finished(self, end: "Finished") -> None:
        """Note the end of a turn with one answer. From now on its stored summary is shown."""
        summary = end.summary
        fed = summary.prefill_tokens
        self.history.end_turn()
        self.first_token = FirstToken.of(summary)
        self._final = summary
        self._machine_at_end = _corrected(self.machine, summary)
        if self.model.cost is not None and fed >= MIN_STEPS and summary.prefill_s > 0:
            self.prefill = MeasuredPrefill.of(self.model.cost, summary.reused_tokens, fed, summary.prefill_s)
        self.turns.append(TurnFigures.of(len(self.turns) + 1, summary, end.reason))

    def set_load(self, load: "MachineLoad") -> None:
        """Note the machine's load."""
        self.load = load
        if load.contended:
            self._contended_samples += 1
            self.busy_steps.extend(self._since_sample)
        else:
            self._contended_samples = 0
        fed = self._fed or any(step.fed for step in self._since_sample)
        self.energy.add_sample(load.energy, sum(step.tokens for step in self._since_sample), fed=fed)
        self._fed = self.phase not in ("idle", "decode")
        self._since_sample.clear()
        self._forget_derived()

    def _changed(self) -> None:
        self.version += 1
        self._forget_derived()

    def _forget_derived(self) -> None:
        """Have the cached properties computed again: several sections read them in one drawing."""
        for name in _CACHED:
            vars(self).pop(name, None)  # where `cached_property` stores its value

    # -- read by the view ------------------------------------------------------------------------------------------

    @property
    def answer(self) -> AnswerRow:
        """The answer of the latest turn; an empty one of a turn with several."""
        if self.answers.is_several:
            return AnswerRow(1)
        return self.answers.rows[0]

    @property
    def charted(self) -> Sequence[StepRecord]:
        """Steps of the turn in order; of several answers, those of the sequence that has most."""
        return self.answers.longest

    @property
    def latency_steps(self) -> Sequence[StepRecord]:
        """The charted steps without the answer's first, whose latency is not between tokens."""
        steps = list(self.charted)
        if steps and steps[0].index == 0:
            return steps[1:]
        return steps

    @property
    def has_steps(self) -> bool:
        """True if there are steps to show: of this answer, or of an earlier one."""
        return bool(self.charted) or bool(self.turns)

    @property
    def step_times(self) -> StepTimes | None:
        """Time of a mean step by part."""
        return step_times(self.figures, self.model.weight_bytes, self.charted)

    @property
    def step_bytes(self) -> Parts:
        """Bytes of a mean step by part."""
        return step_bytes(self.figures, self.model.cost)

    @property
    def last(self) -> StepRecord | None:
        return self.answer.records[-1] if self.answer.records else None

    @property
    def ttft_s(self) -> float | None:
        return self.first_token.ttft_s if self.first_token else None

    @property
    def rate_now(self) -> float | None:
        """Tokens per second over the last second, in total for a batch; None outside decoding."""
        if self.phase != "decode":
            return None
        if self.answers.is_several:
            return self.answers.rate_now
        return self._now.tokens_per_second

    @property
    def rate_average(self) -> float | None:
        """Tokens per second over the turn, 1 / TPOT: without the first step. As stored once the turn is over."""
        if self.answers.is_several:
            return self.answers.rate_average
        if self._final is not None and self._final.decode_tokens_per_second is not None:
            return self._final.decode_tokens_per_second
        return self.answer.totals.tokens_per_second

    @property
    def mbu_average(self) -> float | None:
        """MBU over the turn, of the same steps as `rate_average`; None if busy. As stored once the turn is over."""
        if self._final is not None and self._final.mbu is not None:
            return self._final.mbu
        return self._share(self.answer.totals.achieved_gb_s)

    @property
    def busy(self) -> bool:
        """True if other programs slow the turn down, or did: its MBU would be theirs."""
        if self._final is not None:
            return self._final.busy
        return self.contention is not None

    @property
    def limits(self) -> MachineFacts:
        """The machine whose limits the steps are compared with: as measured at the turn's end, once it is over."""
        at_end = self._machine_at_end
        if at_end is None or at_end.measured_gb_s is None:
            return self.machine
        return at_end

    def _share(self, achieved_gb_s: float | None) -> float | None:
        return mbu(achieved_gb_s, self.limits.memory_gb_s, self.limits.measured_gb_s, busy=self.busy).share

    @property
    def achieved_gb_s(self) -> float | None:
        """Bandwidth over the last second, over the turn once it is over; bytes of steps / their time."""
        return self.totals.achieved_gb_s

    @property
    def totals(self) -> StepTotals:
        """Totals over the last second, over the turn once it is over."""
        if self.phase == "decode" and not self.answers.is_several:
            return self._now
        return self.answers.totals

    @cached_property
    def figures(self) -> StepFigures:
        """Means of the steps of `totals`; of the next step before the first."""
        totals = self.totals
        machine = self.limits
        cost = self.model.cost
        nbytes = 0
        flops = 0.0
        if cost is not None:
            nbytes = cost.step_bytes(self.context)
            flops = cost.step_flops(self.context)
        figures = StepFigures(
            step_bytes=nbytes,
            step_flops=flops,
            peak_gb_s=machine.measured_gb_s,
            compute_flops=machine.flops_per_second,
            slowed_by=self._slowed_by,
            ranks=len(self.model.ranks) or 1,
        )
        if not totals.steps:
            return figures
        rate = self.rate_now or self.rate_average
        tokens = totals.tokens / totals.steps  # of a step
        step_s = None
        if rate:
            step_s = tokens / rate
        return replace(
            figures,
            step_bytes=totals.nbytes / totals.steps,
            step_s=step_s,
            tokens=tokens,
            sequences=totals.records / totals.steps,
            proposed=totals.proposed,
            accepted=totals.accepted,
            step_flops=totals.flops / totals.steps,
        )

    @property
    def _slowed_by(self) -> str:
        """The cause that makes these steps slow, for the sentence."""
        if self.contention is not None:
            return cpu_phrase(self.contention)
        return CPU_BUSY if self.busy else ""

    @cached_property
    def _now(self) -> StepTotals:
        """Totals of the last second."""
        return current_totals(self.answer.records, self.model.cost)

    @property
    def mbu(self) -> float | None:
        """MBU over the last second, over the turn once it is over; None if busy."""
        if self.phase == "decode":
            return self._share(self.achieved_gb_s)
        return self.mbu_average

    @property
    def memory(self) -> MBU:
        """MBU over the steps of `totals`, also where other programs slow them down."""
        return mbu(self.achieved_gb_s, self.limits.memory_gb_s, self.limits.measured_gb_s)

    @cached_property
    def latencies(self) -> Percentiles | None:
        """Percentiles of `latency_steps`."""
        return Percentiles.of([step.latency_s for step in self.latency_steps])

    @property
    def contention(self) -> "MachineLoad | None":
        """The load, if other programs take CPUs that decoding needs; else None."""
        if self._contended_samples < _CONTENDED_SAMPLES:
            return None
        return self.load

    @property
    def running(self) -> TurnFigures | None:
        """The turn in progress."""
        if self.phase not in ("prefill", "decode") or self.answers.is_several:
            return None
        return self.so_far

    @property
    def so_far(self) -> TurnFigures:
        """The turn's answer, as far as it is written."""
        answer = self.answer
        prompt_tokens = answer.reused + answer.prefill_total
        if prompt_tokens:
            prompt_tokens += 1  # the last one feeds the first step
        return TurnFigures(
            number=len(self.turns) + 1,
            prompt_tokens=prompt_tokens,
            reused_tokens=answer.reused,
            completion_tokens=answer.tokens,
            ttft_s=self.ttft_s,
            tokens_per_second=self.rate_average,
            finish_reason=self.phase,
            mbu=self.mbu_average,
            busy=self.busy,
        )

    def frozen(self) -> "LiveMetrics":
        """Return a copy that later events do not change."""
        return deepcopy(self)  # the records of steps are shared: they never change, and there are thousands


_CACHED = [name for name, value in vars(LiveMetrics).items() if isinstance(value, cached_property)]


def _corrected(machine: MachineFacts, summary: Summary) -> MachineFacts:
    """Return the machine's facts that a stored MBU is of: an answer above the measured bandwidth corrected it."""
    achieved = summary.achieved_gb_s
    if not achieved or not summary.mbu or not machine.measured_gb_s or achieved <= machine.measured_gb_s:
        return machine
    return replace(machine, measured_gb_s=achieved / summary.mbu)
