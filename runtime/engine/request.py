"""What goes into the engine and what comes out: a request, and the events it is answered with.

Token ids only. Every generation ends with exactly one `Finished`, whatever ended it; or, where one of several
sequences cannot go on for a reason of its own, with `Failed`.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.runtime.errors import ContextLimitError, HeadraceError, UsageError
from headrace.runtime.metrics.telemetry import StepRecord, Summary
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.speculation.proposer import Speculation

FinishReason = Literal["stop", "length", "cancelled"]


class CancelFlag:
    """Set from anywhere (another thread, a signal handler); read between steps and between prefill chunks.

    `after`: the tokens of the answer that count, where a step said more of them than were wanted; None for all.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.after: int | None = None

    def set(self, after: int | None = None) -> None:
        self.after = self.after if after is None else after
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `max_tokens` None means up to the context limit; `stop_ids` end the turn and are not output."""

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # None: off; n >= 0: the chosen token's, and the n best
    cancel: CancelFlag = field(default_factory=CancelFlag)
    speculate: Speculation = "ngram"  # what may guess tokens ahead; it changes when they come, never which

    def check(self, vocab_size: int, context_limit: int) -> None:
        """Raises UsageError for what is malformed, ContextLimitError for a prompt longer than the context limit."""
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError("max tokens must be at least 1")
        if min(self.prompt) < 0 or max(self.prompt) >= vocab_size:
            raise UsageError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
        if len(self.prompt) > context_limit:
            raise ContextLimitError(
                f"the prompt has {len(self.prompt)} tokens, the context limit is {context_limit}",
                "shorten the prompt",
            )


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of the `total` tokens that prefill feeds are in the cache; `reused` were there already."""

    done: int
    total: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities under the model's own distribution (before penalties, temperature and filters).

    digest: of the bits of all logits of the step.
    """

    chosen: float
    top: list[tuple[int, float]]
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step gave one token, or several that had been guessed. Those of a step that ended the turn lack its
    end-of-turn token."""

    tokens: tuple[int, ...]
    record: StepRecord
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, where they were asked for


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is over. `stop_id` is the end-of-turn token where one ended it; `stop_record` is its step's record
    where that step said nothing else, and therefore was no `Step`.

    The records of all `Step`s and this one are all steps there were, and `summary` can be computed from them.
    """

    reason: FinishReason
    summary: Summary
    stop_id: int | None = None
    stop_record: StepRecord | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What is the sequence's own (its sampler, its stop ids, its cancel flag) raised an error; others go on."""

    error: HeadraceError


Event = PrefillProgress | Step | Finished | Failed
