"""A request's whole state, from submission to end.

`tokens` are the prompt and every token read since. The first `cache.committed` of them are final in the cache;
`cache.length - cache.committed` more are in an in-flight pass. A pass feeds position `cache.length`: a known token or,
at `len(tokens)`, the token that the in-flight pass chooses. The last `draft_entries` of the entries in flight are of
draft tokens, which may be rolled back: no other pass is built until its tokens are read.

    waiting -> prefill -> decode      `Scheduler.admit`, `Scheduler.plan`
    prefill, decode -> preempted      `Scheduler._preempt`
    preempted -> prefill              `Scheduler.admit`
    any -> finished                   `Scheduler.remove`, which `Ending` calls

`commit_batch` appends to `tokens`; only an end and a preemption take the cache away. A preempted sequence waits with
its tokens, and is fed them again. Users outside the engine read a sequence, and end it by `Engine.cancel`.

Guards: tests/runtime/engine/test_step_loop.py and test_many_sequences.py.
"""

from typing import Literal

from msgspec import Struct, field

from headrace.runtime.engine.request import Event, PrefillProgress, Request
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.sampling.constraint import Constraint
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.sampling.section_limit import SectionLimit
from headrace.runtime.speculation.proposer import Proposer, TakesHidden

State = Literal["waiting", "prefill", "decode", "preempted", "finished"]


class Sequence(Struct, eq=False):
    """One submitted request.

    From its submission:
    request: as it was submitted.
    limit: cache entries at most.
    timeline: times of its steps.
    is_reusable: another prompt may begin like it, so its K/V are shared and kept.
    max_output: output tokens at most; set from the request.
    sampler: chooses its tokens; None after its end.

    Set by `commit_batch`, and `output_count` by `Ending`, too:
    tokens: prompt and output, see above; set from the request at first.
    output_count: output tokens that were delivered.
    stop_id: ended the turn; `Finished` follows in the next step.
    reported: entries in the last progress event; at first those of the cached prefix, set by `Engine._admit`.
    constraint: has accepted all output tokens; set from the request.

    Set by `Scheduler`, and `reserved` by `KVBudget`:
    state: see above.
    reserved: entries, in the KV budget.
    branch_point: tokens in common with the next prompt of the queue: a mark there lets it begin with their entries.
    draft_entries: draft tokens of the in-flight pass, its last entries; set to 0 by `commit_batch`.

    Set by `Engine._admit`:
    cache: its K/V while it runs; None again after a preemption and its end.
    marks: its cache has to be marked so that others can begin with its entries.
    served: it was admitted before, and maybe preempted since.
    reused: entries of the cached prefix that it began with.

    From `Drafting.proposers`, at the first admission:
    proposers: the best one drafts. Set by `Engine._admit`; `Drafting` drops those that raise.
    mtp: one of them, if it drafts from hidden states.

    `Ending` clears `cache`, `sampler`, `proposers` and `mtp`. Set by others:
    section: its limit on a section of the output, such as thinking; None without one, and once the section is over.
        Set from the request at first.
    cancelled: by the engine's user; see `is_cancelled`.
    failed: its cache is invalid, since a step with it failed.
    """

    # From its submission
    request: Request
    limit: int
    timeline: Timeline
    is_reusable: bool = True
    max_output: int = 0
    sampler: Sampler | None = None

    # `commit_batch`
    tokens: list[int] = field(default_factory=list)
    output_count: int = 0
    stop_id: int | None = None
    reported: int = 0
    constraint: Constraint | None = None

    # `Scheduler`
    state: State = "waiting"
    reserved: int = 0
    branch_point: int = 0
    draft_entries: int = 0

    # `Engine._admit`
    cache: KVCache | None = None
    marks: bool = False
    served: bool = False
    reused: int = 0

    # `Drafting`
    proposers: list[Proposer] = field(default_factory=list)
    mtp: TakesHidden | None = None

    # Others
    section: SectionLimit | None = None
    cancelled: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        """Set the fields that follow from the request."""
        self.tokens = list(self.request.prompt)
        self.section = self.request.section
        if self.request.grammar is not None:
            self.constraint = self.request.grammar.start()
        self.max_output = self.context_output
        if self.request.max_tokens is not None:
            self.max_output = min(self.max_output, self.request.max_tokens)

    @property
    def prefill_end(self) -> int:
        """Entries of prefill: the first step feeds the prompt's last token."""
        return len(self.request.prompt) - 1

    @property
    def context_output(self) -> int:
        """Output tokens that the context has room for.

        Each has the entry of the token that it follows: the first that of the prompt's last token.
        """
        return self.limit - self.prefill_end

    @property
    def kv(self) -> KVCache:
        """The cache of a running sequence."""
        assert self.cache is not None
        return self.cache

    @property
    def pending(self) -> bool:
        """True if an in-flight pass appends to its cache."""
        return self.kv.length > self.kv.committed

    @property
    def remaining(self) -> int:
        """Output tokens that are neither chosen nor being chosen by an in-flight pass."""
        if self.stop_id is not None:
            return 0
        num_chosen = len(self.tokens) - len(self.request.prompt)
        if self.cache is not None:  # each pass after prefill chooses a token, also the one in flight
            num_chosen = max(num_chosen, self.cache.length - self.prefill_end)
        return self.max_output - num_chosen

    def may_force(self, more: int) -> bool:
        """Return whether the token after the next `more` output tokens may be forced."""
        return self.section is not None and self.section.due(len(self.tokens) - len(self.request.prompt) + more)

    def force_next(self) -> None:
        """Have the sampler choose the token that has to follow, if any.

        All tokens have to be known if one may be forced (`InFlightBatch.decides`).
        """
        sampler = self.sampler
        if self.section is None or sampler is None or not self.may_force(0):
            return
        output = self.tokens[len(self.request.prompt) :]
        if self.section.over(output):
            self.section = None
            sampler.force(None)
            return
        token = self.section.forced(output)
        if token is not None and self.constraint is not None and not self.constraint.allowed([token]):
            token = None  # within a character of several tokens, which the grammar has to end first
        sampler.force(token)

    def constrain_next(self, draft_tokens: tuple[int, ...]) -> None:
        """Have the sampler choose allowed tokens, next and after each draft token. All tokens have to be known."""
        if self.constraint is None or self.sampler is None:
            return
        masks = None
        if self.stop_id is None and self.state != "finished":  # else the tokens will not be read
            masks = self.constraint.masks(draft_tokens)
        self.sampler.constrain(masks)

    @property
    def is_cancelled(self) -> bool:
        """True if it was cancelled."""
        return self.cancelled or bool(self.request.cancel)

    def progress(self) -> PrefillProgress:
        """Return the progress of its prefill."""
        return PrefillProgress(self.kv.committed - self.reused, self.prefill_end - self.reused, self.reused)


Delivery = tuple[Sequence, Event]
"""An event, and whose it is."""
