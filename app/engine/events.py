"""Events from an engine process to its chat or server.

Every submitted `Generate` ends with exactly one of Done, ContextFull, Failed (with its id), Abandoned or Died.
`Prefill` comes before its first `Delta`, but never from another program's server. Texts are as the model generated
them: sanitise them before drawing (`app.output.sanitise`).

Most are made in the engine process. Outside it, `client.py` and `link.py` make those of an engine that has ended or was
stopped, `remote.py` and `remote_answer.py` those of a server elsewhere. `telemetry.py` writes some as JSON and makes
them from it again, for `headrace top` and for a chat with --connect.

A new event is a class here, in one of the unions at the end; readers that do not know it ignore it.

Guards: tests/app/engine/test_client.py and test_remote.py.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.app.answer.answer_steps import StepText
from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.engine.model_card import ModelCard
from headrace.models.text.thinking import Kinds
from headrace.runtime.metrics.telemetry import PoolStats, StepRecord

if TYPE_CHECKING:  # the chat's first frame does not import them
    from headrace.app.predict.uses import Recommendation
    from headrace.models.text.events import Completed, TextChunk
    from headrace.runtime.engine.request import Finished
    from headrace.runtime.engine.sequence import State
    from headrace.runtime.machine.peaks import Peak


class LoadProgress(Struct, frozen=True):
    """A stage of loading.

    stage: for people.
    total: None if unknown.
    is_download: the model's files are still being downloaded or converted.
    """

    stage: str
    done: int
    total: int | None
    is_download: bool = False


class Ready(Struct, frozen=True):
    """The model is loaded."""

    card: ModelCard


class PeakMeasured(Struct, frozen=True):
    """Measured memory bandwidth, and compute in FLOP/s once that is measured, too.

    memory_gb_s: the latest reading without other load; None until there is one.
    """

    peak: "Peak"
    compute_flops: float | None = None
    memory_gb_s: float | None = None


class Recommended(Struct, frozen=True):
    """The model to use instead of the sample model, on this machine."""

    model: "Recommendation"


class Damaged(Struct, frozen=True):
    """The model's files differ from the installed ones; its answers cannot be trusted."""

    message: str
    hint: str | None


class SlowFirstPass(Struct, frozen=True):
    """The model's first pass has taken so many seconds; sent twice a second while it goes on."""

    seconds: float


class PromptCounted(Struct, frozen=True):
    """Token counts of a `PrefetchPrompt`.

    tokens: the whole prompt.
    longest: a prompt that leaves room for an answer.
    message: the last message, if it is the user's.
    files: one count per file.
    """

    id: int
    tokens: int
    longest: int
    message: int = 0
    files: Sequence[int] = ()

    @property
    def room(self) -> int:
        """Tokens available to the last message."""
        return max(0, self.longest - self.tokens + self.message)


class PrefixCached(Struct, frozen=True):
    """The prompt tokens in the KV cache after prefetching.

    used_bytes, allocated_bytes: of the cache.
    reuse: of that prompt, before.
    shared_blocks: K/V blocks that cached sequences other than its own begin with, too.
    """

    tokens: int
    used_bytes: int
    allocated_bytes: int
    reuse: PromptReuse | None = None
    shared_blocks: int = 0


class TokensCounted(Struct, frozen=True):
    """Token count of a `CountTokens`."""

    id: int
    tokens: int


class Prefill(Struct, frozen=True):
    """`done` of `total` tokens are prefilled; `reused` more were cached.

    waited_s, tokenize_s: from the request's submission until its prompt was tokenised, and the time that took.
    reuse: of its prompt, in the first of a request's events.
    unchecked_tools: see `Answer`.
    prompt: its parts as the model gets it, True for control tokens; in the first event, if it was asked for.
    prefill_s: computing so far; None if it is not known.
    """

    id: int
    done: int
    total: int
    reused: int
    waited_s: float = 0.0
    tokenize_s: float = 0.0
    reuse: PromptReuse | None = None
    unchecked_tools: Sequence[str] = ()
    prompt: Sequence[tuple[str, bool]] = ()
    prefill_s: float | None = None


class Delta(Struct, frozen=True, dict=True):
    """Parts of an answer since the last delta, in order, as the `Answerer` gave them.

    ttft_s: seconds from the request to the first text; None before that.
    opening: text of the chat template, before that of the parts.
    has_steps: the text of each step is known; a server's stream does not tell it.
    """

    id: int
    parts: Sequence["TextChunk | Completed"]
    ttft_s: float | None = None
    opening: str = ""
    has_steps: bool = True

    @cached_property
    def text(self) -> str:
        return self.opening + "".join(part.text for part in self.parts)

    @property
    def thinking(self) -> str:
        return "".join(part.thinking for part in self.parts)

    @property
    def content(self) -> str:
        return "".join(part.content for part in self.parts)

    @property
    def kinds(self) -> Kinds:
        """Lengths of the text that is known by kind; that of the opening is known."""
        opening = len(self.opening) + sum(len(part.opening) for part in self.parts)
        closing = sum(len(part.closing) for part in self.parts)
        return Kinds(opening, len(self.thinking), closing, len(self.content))

    @cached_property
    def records(self) -> list[StepRecord]:
        return [part.record for part in self.parts if part.record is not None]

    @cached_property
    def steps(self) -> list[StepText]:
        """The text of each step, where it is known."""
        if not self.has_steps:
            return []
        return [StepText.of(part) for part in self.parts if part.record or part.text]


class Repeats(Struct, frozen=True):
    """The answer has repeated itself for a long time (`app.answer.repetition`). Sent once."""

    id: int


class Done(Struct, frozen=True):
    """The end of an answer. last_turn_fits: see `ContextFull`; False only if it ended at the context limit."""

    id: int
    end: "Finished"
    last_turn_fits: bool = True


class BatchStatus(Struct, frozen=True):
    """State of a batch of several answers, or of all answers of a server: twice a second, and after the last answer.

    states: by generation.
    tokens: generated until `at` (monotonic clock) since the engine was idle.
    batches: batch sizes of the passes since the last report.
    kv_room_bytes: the K/V budget.
    pool_bytes: size of the pool.
    blocks: None without a pool.
    """

    states: "Mapping[int, State]"
    tokens: int
    at: float
    batches: Sequence[int]
    kv_used_bytes: int
    kv_room_bytes: int
    pool_bytes: int
    blocks: PoolStats | None


class ContextFull(Struct, frozen=True):
    """The prompt leaves no room for an answer: the user has to choose what to leave out.

    last_turn_fits: the prompt fits without the turns before the last one.
    """

    id: int
    prompt_tokens: int
    limit: int
    last_turn_fits: bool = True


class Dropped(Struct, frozen=True):
    """The first `messages` messages after the system message were left out of the prompt."""

    id: int
    messages: int


class Failed(Struct, frozen=True):
    """A command failed; the engine continues. id: the generation's; None: the model could not be loaded.

    error: name of the error's class (`runtime.errors`); "" for an unexpected error, whose details are in the log.
    """

    id: int | None
    message: str
    hint: str | None
    error: str = ""


class Abandoned(Struct, frozen=True):
    """The generation was cancelled before its prompt was encoded, or its engine process was ended on purpose."""

    id: int


class Died(Struct, frozen=True):
    """The engine process is gone; `EngineClient.restart` starts another. message: one line for the user."""

    message: str


class PullProgress(Struct, frozen=True):
    """A stage of a download."""

    name: str
    stage: str
    done: int
    total: int | None


class Pulled(Struct, frozen=True):
    """The model is installed."""

    name: str


class PullFailed(Struct, frozen=True):
    """The model could not be fetched."""

    name: str
    message: str
    hint: str | None


AnswerEvent = Prefill | Delta | Repeats | Dropped | ContextFull | Done | Failed | Abandoned | TokensCounted
"""Events of one generation or count, by its id."""
ModelEvent = LoadProgress | Ready | PeakMeasured | Recommended | Damaged | SlowFirstPass | PrefixCached | PromptCounted
PullEvent = PullProgress | Pulled | PullFailed
Event = ModelEvent | AnswerEvent | BatchStatus | Died | PullEvent


def one_line(message: str, hint: str | None) -> str:
    """Return an error with its hint in one line."""
    return f"{message} ({hint})" if hint else message
