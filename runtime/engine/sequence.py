"""A request's whole state, from its submission to its end: what the scheduler moves and the engine fills.

`tokens` are the prompt and every token read since; the first `cache.committed` of them are final in the cache, and
`cache.length - cache.committed` more are in a pass that is under way. A pass feeds position `cache.length`: a token
that is known, or, at `len(tokens)`, the one that the pass under way chooses.
"""

from dataclasses import dataclass, field
from typing import Literal

from headrace.runtime.engine.request import PrefillProgress, Request
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.proposer import Proposer

State = Literal["waiting", "prefill", "decode", "preempted", "finished"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    limit: cache entries it may have. max_output: tokens of its answer, at most. marks: whether its cache has to be
    marked to be come back to. served: whether its turn has come, if only to step back again.
    """

    request: Request
    limit: int
    timeline: Timeline
    sampler: Sampler | None = None  # until its end: it counts what was said
    tokens: list[int] = field(init=False)
    state: State = "waiting"
    cache: KVCache | None = None  # while it runs
    served: bool = False
    reused: int = 0
    max_output: int = field(init=False)
    said: int = 0
    told: int = 0  # entries that its prefill progress has got to
    promised: int = 0  # entries there is room for
    marks: bool = False
    cancelled: bool = False
    failed: bool = False  # what its cache holds is not to be trusted
    proposer: Proposer | None = None
    guessed: int = 0  # entries of guesses in a pass under way: they are last
    stop_id: int | None = None  # what ended the turn, where its `Finished` is still to come

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        steps = self.limit - self.prefill_end
        most = self.request.max_tokens
        self.max_output = steps if most is None else min(steps, most)

    @property
    def prefill_end(self) -> int:
        """How many entries prefill makes: the first step feeds the prompt's last token."""
        return len(self.request.prompt) - 1

    @property
    def kv(self) -> KVCache:
        """Its cache, which it has while it runs."""
        assert self.cache is not None
        return self.cache

    @property
    def pending(self) -> bool:
        """Whether a pass under way appends to its cache."""
        return self.kv.length > self.kv.committed

    @property
    def remaining(self) -> int:
        """Tokens that passes to come may still choose: not chosen before, nor by a pass under way."""
        if self.stop_id is not None:
            return 0
        fed = 0 if self.cache is None else self.cache.length - self.prefill_end
        return self.max_output - max(fed, len(self.tokens) - len(self.request.prompt))

    @property
    def wants_to_end(self) -> bool:
        """Whether somebody cancelled it."""
        return self.cancelled or bool(self.request.cancel)

    def progress(self) -> PrefillProgress:
        """How far its prompt is in the cache."""
        return PrefillProgress(self.kv.committed - self.reused, self.prefill_end - self.reused, self.reused)
