"""Simulated gain of n-gram draft tokens on known answers, with given pass costs and without noise.

python -m tests.bench.speculation_replay [MODEL] [--costs 1:1,2:1.1,4:1.5,8:2.4,16:4.7] [--tokens N] [--batch B]

Every workload is answered once without speculation, greedily and at temperature 1. Proposer, acceptance and controller
then run against the tokens in plain Python, as in the engine: for B equal sequences, first with a new controller and
then with its measurements. `foresight` knows how many draft tokens will be accepted: the upper bound of any policy with
these drafts at these costs.
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
from headrace.runtime.speculation.dry_run import DryRun, Pauses
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.proposer import MAX_DRAFT

Cost = Callable[[int], float]
Asked = tuple[Sequence[int], Sequence[int]]  # prompt, answer
# Default model on two Zen 4 cores, from `headrace bench --speculate`.
COSTS = "1:1,2:1.13,3:1.28,4:1.45,5:1.66,6:1.88,8:2.38,10:3.02,12:3.52,16:4.7,24:7.1,32:9.5"
WAIT = 0.1  # of a step: extra time of a pass that is not queued ahead
STEP_S = 0.01


def replay(
    asked: Sequence[Asked], cost: Cost, *, sampled: bool, foresight: bool = False, controller: Controller | None = None
) -> float:
    """Return tokens per time of sequences that decode together, relative to no speculation.

    asked: prompt and answer of each. cost: of a pass by number of rows, in passes of one row. controller: to reuse.
    """
    controller = controller or Controller()
    sequences = [_Sequence(prompt, answer, sampled) for prompt, answer in asked]
    spent = 0.0
    ahead = False
    unread = 0
    pauses = Pauses()
    while running := [sequence for sequence in sequences if sequence.remaining > unread]:
        accepted = [sequence.right(unread) for sequence in running] if foresight else []
        counts = _best(accepted, cost) if foresight else _chosen(running, controller, unread, pauses)
        took = cost(len(running) + sum(counts)) + (0 if ahead else WAIT)
        spent += took
        for sequence, count in zip(running, counts, strict=True):
            sequence.passes(count, unread)
        controller.record(len(running), sum(counts), took * STEP_S, ahead=ahead)
        ahead = not any(counts)
        unread = int(ahead)
    plain = 0.0
    done = 0
    for running_on, length in enumerate(sorted(len(answer) for _, answer in asked)):
        plain += (length - done) * cost(len(asked) - running_on)
        done = length
    return plain / spent


class _Sequence:
    """A sequence with a known answer, its tokens so far, and its proposer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], sampled: bool) -> None:
        self.proposer = NGram(sampled=sampled)
        self.dry_run = cast(DryRun, self.proposer.dry_run)
        self.tokens, self._whole, self._prompt = list(prompt), [*prompt, *answer], len(prompt)

    @property
    def remaining(self) -> int:
        return len(self._whole) - len(self.tokens)

    def chances_of(self, unread: int, first: bool = False) -> list[float]:
        """Return cumulative chances as `headrace.runtime.engine.drafting` does; `first`: of the first token alone."""
        most = min(MAX_DRAFT, self.remaining - unread - 1)
        if most <= 0 or len(self.tokens) == self._prompt:
            return []
        self.proposer.update(self.tokens)
        if first:
            return list(self.proposer.chances(1))
        return list(accumulate(self.proposer.chances(most + unread), mul))[unread:]

    def start_dry_run(self, count: int, unread: int, cost: float) -> None:
        """Compare so many draft tokens with the output, verified or not."""
        if count and not self.dry_run.pending:
            draft = self.proposer.propose(count + unread)[unread:]
            self.dry_run.start(len(self.tokens) + unread, draft, cost)

    def right(self, unread: int) -> int:
        """Return the number of draft tokens behind the unread token that will be accepted."""
        if not self.chances_of(unread):
            return 0
        return max(0, _right(self.proposer.propose(MAX_DRAFT + unread), self._whole[len(self.tokens) : -1]) - unread)

    def passes(self, count: int, unread: int) -> None:
        """Run a pass with so many draft tokens, and read the in-flight token."""
        draft = self.proposer.propose(count + unread)[unread:] if count else ()
        if unread:
            self.tokens.append(self._whole[len(self.tokens)])
        if draft:
            come = self._whole[len(self.tokens) :]
            self.tokens += come[: 1 + _right(draft, come)]


def _chosen(running: Sequence[_Sequence], controller: Controller, unread: int, pauses: Pauses) -> list[int]:
    """Choose as the engine does (`headrace.runtime.engine.drafting`)."""
    none = [0] * len(running)
    if pauses.skip():
        return none
    if not controller.pays(len(running), 1.0):
        return none
    firsts = [max(sequence.chances_of(unread, first=True), default=0.0) for sequence in running]
    pays = controller.pays(len(running), max(firsts))
    pauses.record(is_quiet=not pays)
    if not pays:
        return none
    chances = [sequence.chances_of(unread) for sequence in running]
    for sequence in running:
        sequence.dry_run.update(sequence.tokens)
    verified = [sequence.dry_run.pays for sequence in running]
    counts = none
    for paid in (False, True):
        counts = controller.choose(
            [
                own[: sequence.dry_run.max_draft(len(own)) if paid else len(own)] if it is paid else ()
                for own, it, sequence in zip(chances, verified, running, strict=True)
            ]
        )
        for sequence, count in zip(running, counts, strict=True):
            excess = controller.excess(len(running), sum(counts)) if count else 0.0
            sequence.start_dry_run(count, unread, len(running) * excess * count / max(1, sum(counts)))
    return counts


def _best(accepted: Sequence[int], cost: Cost) -> list[int]:
    """Return the best counts of draft tokens that are all accepted. A pass with any delays itself or the next one."""
    rows = len(accepted)
    most = min(sum(accepted), MAX_DRAFT_PER_PASS)
    gains = {k: (rows + k) / rows * cost(rows) / (cost(rows + k) + WAIT) for k in range(1, most + 1)}
    best = max(gains, key=gains.__getitem__, default=0)
    left = best if best and gains[best] > 1 else 0
    counts = list[int]()
    for right in accepted:
        counts.append(min(right, left))
        left -= counts[-1]
    return counts


def _right(draft: Sequence[int], come: Sequence[int]) -> int:
    for place, guess in enumerate(draft):
        if place >= len(come) or guess != come[place]:
            return place
    return len(draft)


def read_costs(text: str) -> Cost:
    """Parse `ROWS:COST,...`; linear in between."""
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
    prompts = ChatPrompt(loaded.tokenizer)
    engine = Engine(loaded.network, context_limit=loaded.context_limit)
    for name, workload in load_workloads().items():
        for temperature in (0.0, 1.0):
            prompt = prompts.encode(workload.messages)
            sampling = SamplingParams(temperature=temperature, seed=1)
            most = min(options.tokens, workload.max_tokens)
            request = Request(prompt, most, sampling, loaded.tokenizer.eos_ids, speculate="off")
            answer = [token for event in engine.generate(request) if isinstance(event, Step) for token in event.tokens]
            asked = [(prompt, answer)] * options.batch
            sampled = temperature > 0
            controller = Controller()
            new, learnt = (replay(asked, options.costs, sampled=sampled, controller=controller) for _ in range(2))
            known = replay(asked, options.costs, sampled=sampled, foresight=True)
            print(
                f"{name:8} at {temperature:g}: {len(answer):4} tokens, {new:5.2f}x, then {learnt:5.2f}x,"
                f" foresight {known:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
