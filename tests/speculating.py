"""Speculation made certain for tests: proposers that say what a test wants, and a controller that always agrees."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Request
from headrace.runtime.engine.sequence import Sequence as Sequenced
from headrace.runtime.speculation.controller import Controller


class Always(Controller):
    """Every guess rides along."""

    def pays(self, _sequences: int, _chance: float, _cost_s: float = 0.0) -> bool:
        return True

    def choose(self, promises: Sequence[Sequence[float]], _cost_s: float = 0.0) -> list[int]:
        return [len(own) for own in promises]


class Says:
    """Proposes what `guess(tokens so far, most)` says."""

    source = "test"
    cost_s = 0.0
    needs_all_tokens = False

    def __init__(self, guess: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._guess = guess

    def update(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def chances(self, most: int) -> Sequence[float]:
        return [1.0] * most

    def propose(self, count: int) -> Sequence[int]:
        return self._guess(self._tokens, count)


def oracle(prompt: Sequence[int], answer: Sequence[int], wrong: frozenset[int] = frozenset()) -> Says:
    """It knows the answer, but is wrong about the tokens at some positions of it."""
    whole = [*prompt, *answer]

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        at = len(tokens)
        right = whole[at : at + most]
        return [token ^ 1 if at + i - len(prompt) in wrong else token for i, token in enumerate(right)]

    return Says(guess)


def speculating(network: Any, *, context_limit: int = 256, **options: Any) -> Engine:
    """An engine that verifies every guess there is."""
    engine = Engine(network, context_limit=context_limit, **options)
    engine._guesses.controller = Always()
    return engine


def run(engine: Engine, requests: Sequence[Request], proposers: Sequence[Any] = ()) -> list[list[Event]]:
    """All of them side by side, with these proposers in place of their own."""
    sequences: list[Sequenced] = []
    for number, request in enumerate(requests):
        sequences.append(engine.submit(request))
        if proposers:
            sequences[-1].proposer = proposers[number]
    events: dict[Sequenced, list[Event]] = {sequence: [] for sequence in sequences}
    while engine.has_work:
        for sequence, event in engine.step():
            events[sequence].append(event)
    return [events[sequence] for sequence in sequences]
