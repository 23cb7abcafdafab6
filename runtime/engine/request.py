"""A request and its events, in token ids.

Every generation ends with exactly one `Finished`, or with `SequenceFailed` after an error of one sequence among
several.

`app/answer/answerer.py` makes requests, and turns these events into those with text (`models/text/events.py`). The
records are pickled between processes. A field of `Finished` reaches every surface; CONTRIBUTING.md ("Where things go")
names the files that follow a new field.

Guards: tests/runtime/engine/test_engine.py and test_many_sequences.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

from headrace.runtime.errors import ContextLimitError, HeadraceError, UsageError
from headrace.runtime.metrics.telemetry import StepRecord, Summary
from headrace.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:  # they import MLX, and processes that only read events do without it
    from headrace.runtime.sampling.constraint import Grammar
    from headrace.runtime.sampling.section_limit import SectionLimit
    from headrace.runtime.speculation.proposer import Speculation

FinishReason = Literal["stop", "length", "cancelled"]
EndedBy = Literal["end_of_turn", "stop_string", "max_tokens", "context_limit", "cancelled"]


class CancelFlag:
    """Set from anywhere (another thread, a signal handler); read between steps and between prefill chunks.

    after: tokens of the answer that count, if a step gave more than wanted; None for all.
    """

    def __init__(self, parent: "CancelFlag | None" = None) -> None:
        """parent: a flag that ends this flag's request, too, and maybe others."""
        self._is_set = False  # no threading.Event: a second signal within its `set` would wait for the first one's lock
        self._parent = parent
        self.after: int | None = None

    def set(self, after: int | None = None) -> None:
        if after is not None:
            self.after = after
        self._is_set = True

    def __bool__(self) -> bool:
        return self._is_set or (self._parent is not None and bool(self._parent))


class Request(Struct, frozen=True):
    """One generation.

    prompt: token ids, one or more.
    max_tokens: output tokens; None for as many as the context limit allows.
    sampling: its seed included.
    stop_ids: end the turn, and are not output.
    logprobs: n >= 0 for the chosen token's and those of the n best; None for none.
    cancel: ends it early.
    speculate: proposers of draft tokens; the answer does not depend on it.
    section: a section whose end is forced, as of thinking.
    grammar: of the output.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    cancel: CancelFlag = field(default_factory=CancelFlag)
    speculate: "Speculation" = "auto"
    section: "SectionLimit | None" = None
    grammar: "Grammar | None" = None

    def check(self, vocab_size: int, context_limit: int) -> None:
        """Raise UsageError for malformed values, ContextLimitError for a prompt longer than the context limit."""
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError("max tokens must be at least 1")
        check_ids(self.prompt, vocab_size, "the prompt")
        if len(self.prompt) > context_limit:
            raise ContextLimitError(
                f"the prompt has {len(self.prompt)} tokens, the context limit is {context_limit}",
                "shorten the prompt",
            )


def check_ids(tokens: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise UsageError for token ids outside a network's vocabulary. name: of the tokens, for the error."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UsageError(f"{name} has token ids outside the vocabulary of {vocab_size}")


class PrefillProgress(Struct, frozen=True):
    """`done` of `total` tokens to prefill are in the cache, besides `reused` ones."""

    done: int
    total: int
    reused: int = 0


class TokenLogprobs(Struct, frozen=True):
    """Log probabilities under the model's own distribution (before penalties, temperature and filters).

    digest: of the bits of all logits of the step.
    """

    chosen: float
    top: list[tuple[int, float]]
    digest: int = 0


class Step(Struct, frozen=True):
    """Tokens of one decode step: one, or several with accepted draft tokens. An end-of-turn token is not included.

    rejected: draft tokens that were not accepted, in the place of the last token and those after it.
    """

    tokens: tuple[int, ...]
    record: StepRecord
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, if requested
    rejected: tuple[int, ...] = ()


class Finished(Struct, frozen=True):
    """End of a generation: the one record of it, from the engine to every surface.

    The records of all `Step`s and `stop_record` are all steps; the times of steps in `summary` are computed from them.

    summary: times count from the engine's `submit`; of an `Answer`, from its prompt's submission to its first output.
    stop_id: the end-of-turn token, if one ended it.
    stop_record: the record of its step, if that gave no other token, and so was no `Step`.
    is_full: no token fits into the context.
    seed: gives the answer again; None for greedy decoding.
    stop_string: ended it; the engine knows none.
    thinking_tokens: of its thinking section, tags included; the engine knows none.
    """

    reason: FinishReason
    summary: Summary
    stop_id: int | None = None
    stop_record: StepRecord | None = None
    is_full: bool = False
    seed: int | None = None
    stop_string: str | None = None
    thinking_tokens: int = 0

    @property
    def ended_by(self) -> EndedBy:
        """The reason in detail."""
        match self.reason:
            case "cancelled":
                return "cancelled"
            case "stop":
                return "end_of_turn" if self.stop_string is None else "stop_string"
            case "length":
                return "context_limit" if self.is_full else "max_tokens"


class SequenceFailed(Struct, frozen=True):
    """An error of one sequence's own sampler, stop ids or cancel flag; other sequences continue."""

    error: HeadraceError


Event = PrefillProgress | Step | Finished | SequenceFailed
