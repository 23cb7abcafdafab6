"""What n-gram guesses would gain on answers that are known, on a machine whose passes cost what one says: no noise.

python -m tests.bench.speculation_replay [MODEL] [--costs 1:1,2:1.1,4:1.5,8:2.4,16:4.7] [--tokens N] [--batch B]

Every workload is answered plainly once, greedily and at temperature 1; then proposer, acceptance and controller run
against the tokens in plain Python, as the engine has them do: for B sequences that say the same, first with a new
controller and then with what it has learnt. `foresight` knows how many of its guesses are right: more than that no
policy gets out of these guesses at these costs.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import cast

from headrace.app.bench.measure.workloads import load_workloads
from headrace.models.loading.load import load_resolved
from headrace.models.registry.resolve import resolve
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.speculation.controller import MAX_DRAFT_PER_PASS, Controller
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.proposer import MAX_DRAFT

Cost = Callable[[int], float]
Asked = tuple[Sequence[int], Sequence[int]]  # prompt, answer
# Of the default model on two Zen 4 cores, as `headrace bench --speculate` gave them.
COSTS = "1:1,2:1.13,3:1.28,4:1.45,5:1.66,6:1.88,8:2.38,10:3.02,12:3.52,16:4.7,24:7.1,32:9.5"
WAIT = 0.1  # of a step: what a pass takes more that is not built ahead
STEP_S = 0.01


def replay(
    asked: Sequence[Asked], cost: Cost, *, drawn: bool, foresight: bool = False, controller: Controller | None = None
) -> float:
    """Tokens per time of sequences that decode together, against those without guesses.

    asked: of each, prompt and answer. cost: of a pass of so many rows, in passes of one. controller: one that goes on.
    """
    controller = controller or Controller()
    sequences = [_Sequence(prompt, answer, drawn) for prompt, answer in asked]
    spent, ahead, unread = 0.0, False, 0
    while running := [sequence for sequence in sequences if sequence.left > unread]:
        rights = [sequence.right(unread) for sequence in running] if foresight else []
        counts = _best(rights, cost) if foresight else _chosen(running, controller, unread)
        took = cost(len(running) + sum(counts)) + (0 if ahead else WAIT)
        spent += took
        for sequence, count in zip(running, counts, strict=True):
            sequence.passes(count, unread)
        controller.record(len(running), sum(counts), took * STEP_S, ahead=ahead)
        ahead = not any(counts)
        unread = int(ahead)
    plain, done = 0.0, 0
    for running_on, length in enumerate(sorted(len(answer) for _, answer in asked)):
        plain += (length - done) * cost(len(asked) - running_on)
        done = length
    return plain / spent


class _Sequence:
    """One whose answer is known: what is said of it so far, and who guesses the rest."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], drawn: bool) -> None:
        self.proposer = NGram(sampled=drawn)
        self._tokens, self._whole, self._prompt = list(prompt), [*prompt, *answer], len(prompt)

    @property
    def left(self) -> int:
        return len(self._whole) - len(self._tokens)

    def promises(self, unread: int, likeliest: bool = False) -> list[float]:
        """As `headrace.runtime.engine.drafting` has them; `likeliest`: of the first alone."""
        most = min(MAX_DRAFT, self.left - unread - 1)
        if most <= 0 or len(self._tokens) == self._prompt:
            return []
        self.proposer.update(self._tokens)
        if likeliest:
            return list(self.proposer.chances(1))
        return list(accumulate(self.proposer.chances(most + unread), mul))[unread:]

    def right(self, unread: int) -> int:
        """How many of its guesses for behind the unread token are."""
        if not self.promises(unread):
            return 0
        return max(0, _right(self.proposer.propose(MAX_DRAFT + unread), self._whole[len(self._tokens) : -1]) - unread)

    def passes(self, count: int, unread: int) -> None:
        """A pass with so many guesses; the one before it lands meanwhile, if it is under way."""
        guesses = self.proposer.propose(count + unread)[unread:] if count else ()
        if unread:
            self._tokens.append(self._whole[len(self._tokens)])
        if guesses:
            come = self._whole[len(self._tokens) :]
            self._tokens += come[: 1 + _right(guesses, come)]


def _chosen(running: Sequence[_Sequence], controller: Controller, unread: int) -> list[int]:
    """As the engine asks (`headrace.runtime.engine.drafting`)."""
    none = [0] * len(running)
    if not controller.pays(len(running), 1.0):
        return none
    likeliest = [max(sequence.promises(unread, likeliest=True), default=0.0) for sequence in running]
    if not controller.pays(len(running), max(likeliest)):
        return none
    return controller.choose([sequence.promises(unread) for sequence in running])


def _best(rights: Sequence[int], cost: Cost) -> list[int]:
    """Of guesses that are all right, as many as pay. Each pass with some makes itself wait, or the one behind it."""
    rows, most = len(rights), min(sum(rights), MAX_DRAFT_PER_PASS)
    gains = {k: (rows + k) / rows * cost(rows) / (cost(rows + k) + WAIT) for k in range(1, most + 1)}
    best = max(gains, key=gains.__getitem__, default=0)
    left, counts = best if best and gains[best] > 1 else 0, list[int]()
    for right in rights:
        counts.append(min(right, left))
        left -= counts[-1]
    return counts


def _right(guesses: Sequence[int], come: Sequence[int]) -> int:
    for place, guess in enumerate(guesses):
        if place >= len(come) or guess != come[place]:
            return place
    return len(guesses)


def read_costs(text: str) -> Cost:
    """`ROWS:COST,...`, with straight lines between."""
    points = sorted((int(rows), float(cost)) for rows, cost in (point.split(":") for point in text.split(",")))

    def cost(rows: int) -> float:
        at = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (low, below), (high, above) = points[at - 1], points[at]
        return below + (above - below) * (rows - low) / (high - low)

    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=cast(str, __doc__).splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--costs", type=read_costs, default=COSTS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=320)
    options = parser.parse_args()
    loaded = load_resolved(resolve(options.model))
    prompts, engine = ChatPrompt(loaded.tokenizer), Engine(loaded.network, context_limit=loaded.context_limit)
    for name, workload in load_workloads().items():
        for temperature in (0.0, 1.0):
            prompt = prompts.encode(workload.messages)
            sampling = SamplingParams(temperature=temperature, seed=1)
            most = min(options.tokens, workload.max_tokens)
            request = Request(prompt, most, sampling, loaded.tokenizer.eos_ids, speculate="off")
            answer = [token for event in engine.generate(request) if isinstance(event, Step) for token in event.tokens]
            asked, drawn = [(prompt, answer)] * options.batch, temperature > 0
            controller = Controller()
            new, learnt = (replay(asked, options.costs, drawn=drawn, controller=controller) for _ in range(2))
            known = replay(asked, options.costs, drawn=drawn, foresight=True)
            print(
                f"{name:8} at {temperature:g}: {len(answer):4} tokens, {new:5.2f}x, then {learnt:5.2f}x,"
                f" foresight {known:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
