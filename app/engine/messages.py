"""The messages between a chat and its engine process: commands one way, events the other.

Plain picklable data and nothing heavy: importing this module imports neither mlx nor a model, nor the parts of a
`ModelCard`, which come with the first one, so that the chat's first frame does not wait for them. Every `Generate` that
was submitted ends with exactly one of Done, ContextFull, Failed (with its id), Abandoned or Died. Text in a `Delta` is
what the model generated, unsanitised: whoever draws it makes it safe (`app.output.sanitise`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.runtime.metrics.telemetry import PoolStats, StepRecord, Summary

if TYPE_CHECKING:
    from headrace.runtime.engine.request import FinishReason
    from headrace.runtime.engine.sequence import State
    from headrace.runtime.machine.hardware import Machine
    from headrace.runtime.machine.memory import Budget
    from headrace.runtime.machine.peaks import Peak
    from headrace.runtime.metrics.cost import StepCost

# --- commands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Load this model. `name` is what stands after `-m` (None: the default); `context` None: what memory allows.

    `kv`: how K/V are stored, as after --kv. draft: a smaller model that guesses tokens ahead for it; None for none.
    """

    name: str | None = None
    context: int | None = None
    kv: str = "f16"
    force: bool = False
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer a conversation; several that are submitted are answered side by side.

    messages: `{"role": ..., "content": ...}`, the system message first where there is one.
    sampling: what the user set, by SamplingParams field; the rest is what the model recommends.
    otherwise: sampling for a model that recommends no temperature; empty: greedy.
    thinking: what the chat template of a reasoning model is told; None: nothing.
    speculate: what guesses tokens ahead, see `app.answer.speculation`; None: whatever there is.
    continue_text: the answer so far, to be continued; the deltas bring only what comes after it.
    drop_oldest: where the prompt is too long, leave out the oldest turns and say so with `Dropped`, instead of
    answering with `ContextFull`.
    submitted: the monotonic clock, which all processes of a machine share.
    """

    id: int
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    speculate: str | None = None
    continue_text: str = ""
    drop_oldest: bool = False
    submitted: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the generation `id`, wherever it is; harmless when it is over."""

    id: int


@dataclass(frozen=True, slots=True)
class PrefetchPrompt:
    """Bring the conversation, and what is being typed, into the KV cache; `PrefixCached` tells how far it got.

    Before that, `PromptCounted` says how long the prompt would be. Given up as soon as another command comes. messages,
    thinking: as `Generate` would have them. count_only: bring nothing into the cache. files: texts in the last message
    whose tokens are counted by themselves.
    """

    messages: Sequence[Mapping[str, str]]
    thinking: bool | None = None
    id: int = 0
    count_only: bool = False
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing of your own accord until the next command: another engine decodes, and is being measured."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End, and write before what is still to be written, for at most so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Fetch a model into the store."""

    name: str


Command = ModelSpec | Generate | PrefetchPrompt | Cancel | Rest | Quit | Pull

# --- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCard:
    """The loaded model and the machine it runs on. Sizes in bytes."""

    name: str
    path: str
    origin: str
    licence: str | None
    kind: str  # "headrace" or "mlx-lm": whose decoder runs it
    context_limit: int  # tokens, prompt and answer together
    weight_bytes: int  # of the checkpoint, as loaded
    cost: "StepCost"  # bytes and FLOPs of a decode step at any context
    generation_defaults: Mapping[str, Any]  # generation_config.json
    thinks: bool  # its chat template knows <think> sections
    load_s: float
    machine: "Machine"
    peak: "Peak | None"  # None until measured: a PeakMeasured event follows
    budget: "Budget | None"
    kernels: Mapping[str, str]
    spare_cpus: int  # that decoding leaves to others
    active_memory_bytes: int  # held by MLX after loading
    notes: tuple[str, ...] = ()  # what people should know of what was loaded, a line each
    kv: str | None = None  # what K/V are stored as: a name of `runtime.ops.kv_format`; None: as mlx-lm's classes do
    compute_flops: float | None = None  # FLOP/s, measured (see `runtime.machine.compute`); None until then

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cost.kv_bytes_per_token

    def roofline_tokens_per_second(self, context: int = 0) -> float | None:
        """Measured peak / bytes of a step with `context` tokens in the cache; None until measured."""
        return self.peak.bytes_per_second / self.cost.step_bytes(context) if self.peak else None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading goes on. `stage` is a short phrase; `total` None when unknown."""

    stage: str
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The model answers from now on."""

    card: ModelCard


@dataclass(frozen=True, slots=True)
class PeakMeasured:
    """This machine's memory bandwidth and how fast it multiplies, measured while the engine was idle.

    compute_flops: FLOP/s; None until that was measured too.
    """

    peak: "Peak"
    compute_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Damaged:
    """The model's files are not what was installed; its answers are not to be trusted. One line, and what to do."""

    message: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class PromptCounted:
    """The prompt that `PrefetchPrompt` brought would have so many tokens; `longest`: what leaves room for an answer.

    message: tokens of its last message alone, if that is the user's. files: of each of its files.
    """

    id: int
    tokens: int
    longest: int
    message: int = 0
    files: Sequence[int] = ()

    @property
    def room(self) -> int:
        """Tokens that the last message may have."""
        return max(0, self.longest - self.tokens + self.message)


@dataclass(frozen=True, slots=True)
class PrefixCached:
    """What the KV cache holds of the next prompt after reading ahead."""

    tokens: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """`done` of the `total` tokens to prefill are in the cache; `reused` more were there from the turn before."""

    id: int
    done: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the answer (perhaps no text yet), and the records of the steps that made it.

    ttft_s: seconds from the request to the answer's first text, once there is one. accepted_spans: (begin, end) in
    `text` of accepted draft tokens, in order.
    """

    id: int
    text: str
    records: Sequence[StepRecord]
    ttft_s: float | None = None
    accepted_spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is over. ttft_s counts from the submission in the chat's process to the first text delivered.

    context_full: it ended because the context limit was reached. mbu is a fraction of the measured peak.
    """

    id: int
    reason: "FinishReason"
    summary: Summary
    tokenize_s: float
    ttft_s: float | None
    context_full: bool
    mbu: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """All that are being answered, sent twice a second while there are several, and once when the last has ended.

    states: of each generation. tokens: that were said until `at` (monotonic clock) since nothing was being answered.
    batches: of each pass since the last of these, how many sequences it was for. kv_room_bytes: what K/V may take.
    pool_bytes: what the pool's blocks take, held or not. blocks: None where the engine has no pool.
    """

    states: "Mapping[int, State]"
    tokens: int
    at: float
    batches: Sequence[int]
    kv_used_bytes: int
    kv_room_bytes: int
    pool_bytes: int
    blocks: PoolStats | None


@dataclass(frozen=True, slots=True)
class ContextFull:
    """Nothing was generated: the prompt leaves no room for an answer. Somebody has to decide what goes."""

    id: int
    prompt_tokens: int
    limit: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The first `messages` messages after the system message were left out of the prompt, as asked."""

    id: int
    messages: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed and the engine lives on. `id` is the generation's; None: the model could not be loaded."""

    id: int | None
    message: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The engine's process was ended on purpose (another model, a restart) before this generation was over."""

    id: int


@dataclass(frozen=True, slots=True)
class Died:
    """The engine's process is gone; `message` is one line for the user. `EngineClient.restart` brings it back."""

    message: str


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A model is being fetched in the background."""

    name: str
    stage: str
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The model is installed and can be started."""

    name: str


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The model could not be fetched."""

    name: str
    message: str
    hint: str | None


ModelEvent = LoadProgress | Ready | PeakMeasured | Damaged | PrefixCached | PromptCounted
PullEvent = PullProgress | Pulled | PullFailed
Event = ModelEvent | Prefill | Delta | Done | Served | ContextFull | Dropped | Failed | Abandoned | Died | PullEvent


def one_line(message: str, hint: str | None) -> str:
    """What went wrong and what can be done, for a line of the screen."""
    return f"{message} ({hint})" if hint else message
