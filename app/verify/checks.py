"""Identity checks: every answer alone against the same answer in batches.

Each check serves the same requests in another way (`serving.py`) and compares tokens, logits and K/V with the first. A
new check is a row of `_checks`, and a way to serve.

Guard: tests/app/verify/test_verify.py.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.verify.expectation import Expectation
from headrace.app.verify.serving import FixedPace, Served, Serving, Tick
from headrace.app.verify.trace import TOP, Flip, Trace, TraceComparison, compare
from headrace.models.loading.load import LoadedModel
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.machine.hardware import machine
from headrace.runtime.ops import BLOCK, native
from headrace.runtime.sampling.params import SamplingParams

LENGTHS = (1, 129, 40, 250, 9, 64, 17, 200)  # prompt lengths around the sizes of blocks and caches
SOME = 8  # sequences, where more add nothing
SHARERS = 4  # sequences with a common prefix
CROWD = 6  # sequences that outgrow a small KV pool
WHOLE = 512  # tokens, longer than any prompt


Begin = Callable[[int, int, str], None]
"""Called before a check with its number (0: the answers to compare with), the number of checks, and its name."""


class VerifyPlan(Struct, frozen=True):
    """Size of a verification.

    tokens: per answer.
    sequences: requests, and the most that run at a time.
    seed: of prompts, lengths and times.
    """

    tokens: int = 24
    sequences: int = 16
    seed: int = 0


class KVChange(Struct, frozen=True):
    """The first changed entry of a sequence."""

    sequence: int
    position: int


class CheckResult(Struct, frozen=True, kw_only=True):
    """An entry of `checks`, see docs/verify.md.

    result: `equal` (every bit), `close` (tokens equal, log probabilities within tolerance), `near ties` (only nearly
    equally likely tokens flipped), `differs`.
    """

    name: str
    result: str
    sequences: int
    tokens: int
    missing_tokens: int
    kv_entries: int
    changed_kv_entries: int
    largest_gap: float
    flips: list[Flip]
    kv_changes: list[KVChange]
    note: str

    @property
    def passed(self) -> bool:
        return self.result != "differs"


class Check(Struct, frozen=True):
    """A way to serve."""

    name: str
    serve: Callable[[], Served]  # returns answers in the order of `expected`, and a remark
    expected: list[Trace]
    cut: bool = False  # answers may end early


class Verification:
    """The checks of one model. Raises UsageError if its context is too short for them.

    here: the same model on this machine alone, if several share `loaded` and it fits.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        expected: Expectation,
        plan: VerifyPlan,
        tick: Tick = lambda: None,
        here: LoadedModel | None = None,
    ) -> None:
        # Entries of a cache: two chunks and an answer hold each request below.
        limit = min(loaded.context_limit, 2 * CHUNK + plan.tokens)
        if plan.tokens > limit // 2:
            raise UsageError(f"--tokens {plan.tokens}: too many for a context of {limit} tokens")
        draw = random.Random(plan.seed)
        vocabulary = loaded.network.vocab_size

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocabulary) for _ in range(max(1, min(count, limit - plan.tokens)))]

        def request(prompt: list[int], number: int) -> Request:
            # Sampled tokens may differ beyond near-ties wherever bits may, so only exact models are sampled.
            sampling = SamplingParams()
            if expected.exact and number % 2:
                sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=number)
            return Request(prompt, max_tokens=plan.tokens, sampling=sampling, logprobs=TOP)

        self._expected = expected
        self._tokenizer = loaded.tokenizer
        self._plan = plan

        # Requests: of many lengths; with a common prefix; and such that end just before a block of K/V is full.
        prompts = [tokens(LENGTHS[number % len(LENGTHS)]) for number in range(plan.sequences)]
        requests = [request(prompt, number) for number, prompt in enumerate(prompts)]
        self._prefix = tokens(min(2 * BLOCK, limit - plan.tokens - 16))
        sharers = [request([*self._prefix, *tokens(3 + 4 * number)], number) for number in range(SHARERS)]
        ends = [CHUNK - draw.randrange(plan.tokens) // 2 for _ in range(CROWD)]
        crowd = [request(tokens(length), number) for number, length in enumerate(ends)]

        # The same requests go to several ways to serve.
        self._crowd = Serving(loaded.network, crowd, limit, tick)
        self._all = Serving(loaded.network, requests, limit, tick)
        self._few = Serving(loaded.network, requests[:SHARERS], limit, tick)
        self._some = Serving(loaded.network, requests[:SOME], limit, tick)
        self._sharers = Serving(loaded.network, sharers, limit, tick)
        self._here = None if here is None else Serving(here.network, requests[:SHARERS], limit, tick)
        self._stores = self._few.in_blocks and not loaded.ranks

    def run(self, begin: Begin = lambda *_: None) -> Iterator[CheckResult]:
        """Run every check; `begin(number, of, name)` is called before each."""
        names = [check.name for check in self._checks([], [], [])]
        begin(0, len(names), "each alone")
        (alone, _), (crowd, _), (sharers, _) = (it.one_by_one() for it in (self._all, self._crowd, self._sharers))
        for number, check in enumerate(self._checks(alone, crowd, sharers), 1):
            begin(number, len(names), check.name)
            traces, note = check.serve()
            pairs = enumerate(zip(check.expected, traces, strict=True))
            compared = [compare(index, *pair, cut=check.cut) for index, pair in pairs]
            yield judged(self._expected, check.name, compared, self._tokenizer, note)

    def _checks(self, alone: list[Trace], crowd: list[Trace], sharers: list[Trace]) -> Iterator[Check]:
        max_running = self._plan.sequences
        seed = self._plan.seed
        if self._here is not None:
            yield Check("alone, on this machine only", self._here.generated, alone[:SHARERS])
        yield Check("alone, by another call", self._few.generated, alone[:SHARERS])
        yield Check("alone, from a queue", partial(self._few.together, 1), alone[:SHARERS])
        for size in (2, 4, 8, 16):
            if size <= max_running:
                serving = self._some if size <= SOME else self._all
                # A fixed pace, since short prompts would otherwise have ended before long ones begin.
                together = partial(serving.together, size, FixedPace(lambda: CHUNK))
                yield Check(f"{size} at a time", together, alone[: len(serving.requests)])
        if max_running > 1:
            joining = partial(self._all.joining, max_running, seed)
            yield Check("joining, ending, cancelled, preempted", joining, alone, cut=True)
        yield Check("short of memory, preempted", partial(self._crowd.preempted, CROWD), crowd)
        yield Check("with a shared prefix", partial(self._sharers.sharing, self._prefix), [*sharers, *sharers])
        if self._stores:
            yield Check("after a restart, K/V from disk", self._few.restarted, alone[:SHARERS])
        sizes = random.Random(seed)
        for name, serving, draw in (
            ("prompts token by token", self._few, lambda: 1),
            ("prompts in chunks of any size", self._some, lambda: sizes.randrange(1, 200)),
            ("prompts in one chunk", self._some, lambda: WHOLE),
        ):
            yield Check(name, partial(serving.together, max_running, FixedPace(draw)), alone[: len(serving.requests)])
        now = native.status().threads
        if now is not None and ops.select().name == native.name:
            for threads in sorted({1, 2, machine().usable_cores} - {now}):
                yield Check(f"threads: {threads} instead of {now}", partial(self._on, threads), alone[:SOME])

    def _on(self, threads: int) -> Served:
        before = native.status().threads
        native.set_threads(threads)
        try:
            return self._some.together(SOME)
        finally:
            native.set_threads(before or 0)


def judged(
    expected: Expectation, name: str, compared: list[TraceComparison], tokenizer: Tokenizer, note: str = ""
) -> CheckResult:
    """Return the result of a check.

    expected: equal bits, or near-ties.
    name: of the check.
    compared: one per sequence.
    tokenizer: for the text of flipped tokens.
    note: a remark; empty without one.
    """
    verdicts = {_verdict(expected, comparison) for comparison in compared}
    text = tokenizer.token_text
    return CheckResult(
        name=name,
        result=next(verdict for verdict in ("differs", "near ties", "close", "equal") if verdict in verdicts),
        sequences=len(compared),
        tokens=sum(comparison.tokens for comparison in compared),
        missing_tokens=sum(comparison.missing for comparison in compared),
        kv_entries=sum(comparison.entries for comparison in compared),
        changed_kv_entries=sum(len(comparison.changed) for comparison in compared),
        largest_gap=max((comparison.gap for comparison in compared), default=0.0),
        flips=[
            replace(flip, expected_text=text(flip.expected), got_text=text(flip.got))
            for comparison in compared
            if (flip := comparison.flip) is not None
        ],
        kv_changes=[
            KVChange(number, comparison.changed[0]) for number, comparison in enumerate(compared) if comparison.changed
        ],
        note=note,
    )


def _verdict(expected: Expectation, comparison: TraceComparison) -> str:
    if comparison.same_bits:
        return "equal"
    if expected.exact or comparison.missing or comparison.gap > expected.tolerance:
        return "differs"
    if comparison.flip is None:
        return "close"
    # The margin is a difference of two log probabilities, each of which may be off by the tolerance.
    margin = comparison.flip.margin
    if margin is not None and margin <= 2 * expected.tolerance:
        return "near ties"
    return "differs"
