"""A scripted ChatEngine without a process, driven by `poll`.

Every submitted generation plays the next script, beside the others: one event list per poll. Steps get plausible
records, so figures and charts have something to show. `die()` is a SIGKILL.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineState
from headrace.app.engine.commands import Generate, PrefetchPrompt
from headrace.app.engine.events import (
    Abandoned,
    BatchStatus,
    ContextFull,
    Delta,
    Died,
    Done,
    Event,
    Failed,
    LoadProgress,
    Prefill,
    Pulled,
    PullFailed,
    PullProgress,
    Ready,
    Repeats,
    SlowFirstPass,
)
from headrace.app.engine.model_card import ModelCard
from headrace.models.text.events import TextChunk
from headrace.models.text.thinking import ThinkingSplitter
from headrace.runtime.engine.request import Finished, FinishReason, Step
from headrace.runtime.engine.sequence import State
from headrace.runtime.errors import EngineError
from headrace.runtime.machine.hardware import Machine
from headrace.runtime.machine.peaks import Peak
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.metrics.telemetry import Percentiles, PoolStats, StepRecord, Summary

COST = StepCost(
    weight_bytes=98_000_000, weight_flops=270_000_000, kv=[LayerKV(30, 768)], attention_flops_per_entry=2304
)
LATENCY_S = 0.006
MACHINE = Machine(
    backend="cpu",
    device_name="Scripted CPU",
    architecture="x86_64",
    memory_bytes=16 << 30,
    device_memory_bytes=None,
    os="Linux 6.1 x86_64",
    cpu="Scripted CPU",
    physical_cores=4,
    usable_cores=4,
    isa=frozenset(),
)
PEAK = Peak(54e9, 53e9, 55e9, 12, 1 << 28, "memcmp, 4 threads", "2025-01-01T00:00:00Z")
CARD = ModelCard(
    name="scripted-1b",
    path="/models/scripted-1b",
    origin="a test",
    licence="Apache-2.0",
    kind="headrace",
    context_limit=512,
    weight_bytes=98_000_000,
    cost=COST,
    generation_defaults={"temperature": 0.7, "min_p": 0.05},
    thinks=False,
    load_s=0.2,
    machine=MACHINE,
    peak=PEAK,
    budget=None,
    kernels={"kernels": "reference"},
    spare_cpus=2,
    active_memory_bytes=120_000_000,
)


@dataclass
class Script:
    """One answer. pieces: the text of each step. fail: refuse instead. full: answer with ContextFull.

    guessed: characters of every other piece that came by guesses, as many tokens as characters; rejected: the draft
    token behind them.
    repeats: report a repetition after the first piece.
    hold: stop before this many pieces remain unsaid, until the test cancels, dies or calls `release`.
    first_pass: seconds of a slow first pass, by report; the last one is repeated until the test calls `release`.
    """

    pieces: Sequence[str] = ("Hello", ", ", "world", ".")
    reason: FinishReason = "stop"
    prompt_tokens: int = 20
    reused: int = 0
    context_full: bool = False
    fail: str | None = None
    full: bool = False
    hold: int = 0
    guessed: int = 0
    rejected: str = " wrong"
    reuse: PromptReuse | None = None
    repeats: bool = False
    first_pass: Sequence[float] = ()


@dataclass
class ScriptedEngine:
    """state and card as in ChatEngine; commands: every Generate that was submitted, in order."""

    scripts: deque[Script] = field(default_factory=deque)
    card_to_load: ModelCard = CARD
    load_failure: str | None = None
    state: EngineState = "stopped"
    card: ModelCard | None = None
    pid: int | None = None
    is_remote: bool = False
    commands: list[Generate] = field(default_factory=list)
    ahead: list[PrefetchPrompt] = field(default_factory=list)
    specs: list[ModelSpec] = field(default_factory=list)
    pulls: list[str] = field(default_factory=list)
    pull_failure: str | None = None
    pieces_per_poll: int = 1
    rests: int = 0
    timed_every: int | None = None

    def __post_init__(self) -> None:
        self._backlog: list[Event] = []
        self._playing: dict[int, Iterator[Event]] = {}
        self._waiting: deque[Generate] = deque()
        self._cancelled: set[int] = set()
        self._looks = self._tokens = 0
        self._released = False
        self._pull: tuple[str, int] | None = None

    # --- ChatEngine ------------------------------------------------------------------------------------------

    @property
    def starts(self) -> int:
        return len(self.specs)

    def start(self, spec: ModelSpec) -> None:
        self._abandon()
        self.specs.append(spec)
        self.state = "loading"
        self.card = None

    def restart(self) -> None:
        if not self.specs:
            raise EngineError("no model was ever started")
        self.start(self.specs[-1])

    def submit(self, command: Generate) -> None:
        if self.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")
        self.commands.append(command)
        self._waiting.append(command)

    def prefetch(self, command: PrefetchPrompt) -> None:
        self.ahead.append(command)

    def rest(self) -> None:
        self.rests += 1

    def time_steps(self, every: int) -> None:
        self.timed_every = every

    def cancel(self, generation: int | None = None) -> None:
        there = {*self._playing, *(command.id for command in self._waiting)}
        ended = there if generation is None else there & {generation}
        if self.state == "loading":
            self._backlog += map(Abandoned, sorted(ended))
            self._waiting = deque(command for command in self._waiting if command.id not in ended)
        else:
            self._cancelled |= ended

    def poll(self) -> list[Event]:
        events = self._backlog
        self._backlog = []
        if self.state == "loading":
            events += self._load()
        elif self.state == "ready":
            while self._waiting:
                command = self._waiting.popleft()
                self._playing[command.id] = self._play(command)
            several = len(self._playing) > 1
            for number in tuple(self._playing):
                events += self._pieces_of(number)
            if several:
                events.append(self._served(events))
        return events + self._poll_pull()

    def _served(self, events: list[Event]) -> BatchStatus:
        self._looks += 1
        self._tokens += sum(len(event.records) for event in events if isinstance(event, Delta))
        states: dict[int, State] = dict.fromkeys(self._playing, "decode")
        batches = (len(self._playing),) * self.pieces_per_poll if states else ()
        blocks = PoolStats(24, 12, 30, 10)
        return BatchStatus(states, self._tokens, self._looks * LATENCY_S, batches, 3 << 20, 64 << 20, 8 << 20, blocks)

    def _pieces_of(self, number: int) -> list[Event]:
        events = []
        for _ in range(self.pieces_per_poll):
            events.append(next(self._playing[number]))
            if isinstance(events[-1], Done | Failed | ContextFull):
                del self._playing[number]
                self._cancelled.discard(number)
                self._released = self._released and bool(self._playing)
                break
        return events

    def pull(self, name: str) -> None:
        if self._pull is not None:
            raise EngineError(f"{self._pull[0]} is still being fetched", "one at a time")
        self.pulls.append(name)
        self._pull = (name, 0)

    def cancel_pull(self) -> None:
        if self._pull is not None:
            self._backlog.append(PullFailed(self._pull[0], f"fetching {self._pull[0]} was stopped", None))
            self._pull = None

    def close(self) -> None:
        self._abandon()
        self.state = "stopped"
        self.card = None

    # --- what a test does to it ------------------------------------------------------------------------------

    def script(self, *scripts: Script) -> "ScriptedEngine":
        """Queue answers; the default script plays after them."""
        self.scripts.extend(scripts)
        return self

    def release(self) -> None:
        """Continue a held answer."""
        self._released = True

    def die(self) -> None:
        """Act like a killed process."""
        self._waiting.clear()
        self._playing.clear()
        self._backlog.append(
            Died("the engine was killed (SIGKILL); if you did not do it, the system was out of memory")
        )
        self.state = "dead"
        self.card = None

    # --- playing ---------------------------------------------------------------------------------------------

    def _load(self) -> list[Event]:
        if self.load_failure is not None:
            self.state = "failed"
            waiting = self._waiting
            self._waiting = deque()
            return [
                Failed(None, self.load_failure, None),
                *(Failed(command.id, "no model is loaded", None) for command in waiting),
            ]
        self.state, self.card = "ready", self.card_to_load
        return [LoadProgress("loading weights", 0, None), Ready(self.card_to_load)]

    def _play(self, command: Generate) -> Iterator[Event]:
        script = self.scripts.popleft() if self.scripts else Script()
        if script.fail is not None:
            yield Failed(command.id, script.fail, None)
            return
        if script.full:
            yield ContextFull(command.id, self.card_to_load.context_limit + 1, self.card_to_load.context_limit)
            return
        total = script.prompt_tokens - 1 - script.reused
        for seconds in script.first_pass:
            yield SlowFirstPass(seconds)
        while script.first_pass and not self._released:
            yield SlowFirstPass(script.first_pass[-1])
        yield Prefill(command.id, total // 2, total, script.reused, reuse=script.reuse)
        yield Prefill(command.id, total, total, script.reused)
        said = 0
        splitter = ThinkingSplitter()
        for piece in script.pieces:
            while len(script.pieces) - said <= script.hold and not (command.id in self._cancelled or self._released):
                yield Delta(command.id, ())
            if command.id in self._cancelled:
                break
            step = record(said, script.prompt_tokens + said, len(self._playing))
            guessed = script.guessed * (said % 2)  # in every other step
            pieces: tuple[str, ...] = (piece,)
            rejected: tuple[str, ...] = ()
            if guessed:
                accepted = min(guessed, len(piece))
                step = replace(step, proposed=guessed + 1, accepted=accepted, source="ngram")
                pieces = (*piece[:guessed], piece[guessed:])
                rejected = (script.rejected,)
            by_kind = splitter.by_kind(*splitter.feed(piece))
            chunk = TextChunk(piece, Step((said,), step), *by_kind, pieces=pieces, rejected=rejected)
            yield Delta(command.id, [chunk])
            said += 1
            if script.repeats and said == 1:
                yield Repeats(command.id)
        reason: FinishReason = "cancelled" if command.id in self._cancelled else script.reason
        ended = summary(script.prompt_tokens, script.reused, said)
        ended = ended if self.card_to_load.peak is not None else replace(ended, mbu=None)
        yield Done(command.id, Finished(reason, ended, is_full=script.context_full))

    def _poll_pull(self) -> list[Event]:
        if self._pull is None:
            return []
        name, done = self._pull
        if self.pull_failure is not None:
            self._pull = None
            return [PullFailed(name, self.pull_failure, None)]
        if done >= 100:
            self._pull = None
            return [Pulled(name)]
        self._pull = (name, done + 25)
        return [PullProgress(name, "downloading", done + 25, 100)]

    def _abandon(self) -> None:
        self._backlog += map(Abandoned, [*self._playing, *(command.id for command in self._waiting)])
        self._waiting.clear()
        self._playing.clear()


def record(index: int, context: int, batch: int = 1) -> StepRecord:
    """Return a step's record with a plausible latency."""
    return StepRecord(
        index=index,
        context=context,
        latency_s=LATENCY_S * (1 + 0.1 * (index % 5)),
        weight_bytes=COST.weight_bytes,
        kv_bytes_read=COST.kv_bytes_read(context - 1),
        kv_bytes_written=COST.kv_bytes_written(),
        kv_used_bytes=COST.kv_bytes(context),
        kv_allocated_bytes=COST.kv_bytes(-(-context // 256) * 256),
        active_memory_bytes=130_000_000,
        peak_memory_bytes=140_000_000,
        batch=batch,
    )


def summary(prompt_tokens: int, reused: int, said: int) -> Summary:
    """Return a summary that fits `record`."""
    return Summary(
        prompt_tokens=prompt_tokens,
        reused_tokens=reused,
        prefill_tokens=prompt_tokens - 1 - reused,
        completion_tokens=said,
        steps=said,
        prefill_s=0.04,
        first_step_s=LATENCY_S if said else None,
        ttft_s=0.05 if said else None,
        step_latency=Percentiles(LATENCY_S, LATENCY_S * 1.3, LATENCY_S * 1.4, LATENCY_S * 1.4) if said > 1 else None,
        step_s=LATENCY_S if said > 1 else None,
        itl=Percentiles(LATENCY_S, LATENCY_S * 1.3, LATENCY_S * 1.4, LATENCY_S * 1.4) if said > 1 else None,
        tpot_s=LATENCY_S if said > 1 else None,
        weight_bytes_per_step=COST.weight_bytes,
        kv_bytes_per_token=COST.kv_bytes_per_token,
        kv_cache_bytes=COST.kv_bytes(prompt_tokens + said - 1),
        achieved_gb_s=16.9 if said > 1 else None,
        peak_memory_bytes=140_000_000,
        mbu=0.31,
    )


def with_context(limit: int) -> ModelCard:
    """Return the scripted model's card with another context limit."""
    return replace(CARD, context_limit=limit)
