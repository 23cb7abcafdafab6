"""Deterministic speculation for tests: scripted proposers and a controller that always verifies."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Request
from headrace.runtime.engine.sequence import Sequence as Sequenced
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.dry_run import DryRun


class Always(Controller):
    """Verifies every draft token."""

    def pays(self, _sequences: int, _chance: float, _cost_s: float = 0.0, **_: Any) -> bool:
        return True

    def choose(self, chances: Sequence[Sequence[float]], _costs_s: Sequence[float] = (), **_: Any) -> list[int]:
        return [len(own) for own in chances]

    def gain(self, _sequences: int, chances: Sequence[float], _cost_s: float = 0.0, **_: Any) -> float:
        return float(len(chances))

    def excess(self, _sequences: int, _count: int, **_: Any) -> float:
        return -1e6  # a dry run pays before anything is compared


class Scripted:
    """Proposes the result of `draft(tokens so far, count)`, verified at once or after a dry run that pays."""

    source = "test"
    cost_s = 0.0
    needs_all_tokens = False
    is_wanted = True

    def __init__(self, draft: Callable[[Sequence[int], int], Sequence[int]], *, dry_run: DryRun | None = None) -> None:
        self._draft = draft
        self.dry_run = dry_run

    def update(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def chances(self, count: int) -> Sequence[float]:
        return [1.0] * count

    def propose(self, count: int) -> Sequence[int]:
        return self._draft(self._tokens, count)


def oracle(
    prompt: Sequence[int],
    answer: Sequence[int],
    wrong: frozenset[int] = frozenset(),
    *,
    dry_run: DryRun | None = None,
) -> Scripted:
    """Propose the known answer, with wrong tokens at some positions."""
    whole = [*prompt, *answer]

    def draft(tokens: Sequence[int], count: int) -> list[int]:
        at = len(tokens)
        right = whole[at : at + count]
        return [token ^ 1 if at + i - len(prompt) in wrong else token for i, token in enumerate(right)]

    return Scripted(draft, dry_run=dry_run)


def speculating(network: Any, *, context_limit: int = 256, **options: Any) -> Engine:
    """Return an engine that verifies every draft token."""
    engine = Engine(network, context_limit=context_limit, **options)
    engine._drafting.controller = Always()
    return engine


def run(engine: Engine, requests: Sequence[Request], proposers: Sequence[Any] = ()) -> list[list[Event]]:
    """Run all requests together, with these proposers in place of their own."""
    sequences: list[Sequenced] = []
    for number, request in enumerate(requests):
        sequences.append(engine.submit(request))
        if proposers:
            sequences[-1].proposers = [proposers[number]]
    events: dict[Sequenced, list[Event]] = {sequence: [] for sequence in sequences}
    while engine.has_work:
        for sequence, event in engine.step():
            events[sequence].append(event)
    return [events[sequence] for sequence in sequences]


class Corrected:
    """A head's proposer whose draft tokens are replaced by the known answer's, many by a wrong one.

    firsts: the head's own first draft token, by the number of tokens known.
    """

    source = "mtp"
    needs_all_tokens = True
    is_wanted = True
    dry_run = None
    cost_s = 0.0

    def __init__(self, mtp: Any, whole: Sequence[int]) -> None:
        self._mtp = mtp
        self._whole = whole
        self.firsts: dict[int, int] = {}

    def update(self, tokens: Sequence[int]) -> None:
        self._known = len(tokens)
        self._mtp.update(tokens)

    def chances(self, count: int) -> Sequence[float]:
        return [1.0] * min(count, 3)

    def propose(self, count: int) -> Sequence[int]:
        own = self._mtp.propose(count)
        if own:
            self.firsts[self._known] = own[0]
        right = self._whole[self._known : self._known + count]
        return [token ^ 1 if (self._known + at) * 7 % 10 < 4 else token for at, token in enumerate(right)]


def run_corrected(
    network: Any, prompts: Sequence[Sequence[int]], wholes: Sequence[Sequence[int]], *, preempts: bool = False
) -> tuple[list[Sequenced], list[Corrected], list[str]]:
    """Run prompts together, with their prediction heads corrected to `wholes`, prompts and answers.

    Returns sequences, proposers, and the states of the second sequence by step. preempts: it is preempted once.
    """
    engine = speculating(network, context_limit=128)
    sequences = [
        engine.submit(Request(prompt, len(whole) - len(prompt), speculate="mtp"))
        for prompt, whole in zip(prompts, wholes, strict=True)
    ]
    corrected = list[Corrected]()
    states = list[str]()
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        states.append(sequences[1].state)
        if not corrected and all(sequence.mtp for sequence in sequences):
            corrected = [Corrected(own.proposers[0], whole) for own, whole in zip(sequences, wholes, strict=True)]
            for sequence, proposer in zip(sequences, corrected, strict=True):
                sequence.proposers = [proposer]
        if preempts and steps == 8:
            engine.preempt_youngest()
    return sequences, corrected, states
