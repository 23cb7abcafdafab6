"""What n-gram guesses would gain on answers that are known, on a machine whose passes cost what one says: no noise.

python -m tests.bench.speculation_replay [MODEL] [--costs 1:1,2:1.3,4:1.8,8:2.7,16:5] [--tokens N]

Every workload is answered plainly once, greedily and at temperature 1; then proposer, acceptance and controller run
against the tokens in plain Python, as the engine has them do. `foresight` knows how many of its guesses are right: more
than that no policy gets out of these guesses at these costs.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import cast

from headrace.app.bench.measure.workloads import load_workloads
from headrace.models.load import load_resolved
from headrace.models.registry.resolve import resolve
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine import Engine
from headrace.runtime.request import Request, Step
from headrace.runtime.sampling import SamplingParams
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.proposer import MOST

Cost = Callable[[int], float]
WAIT = 0.1  # of a step: what a pass takes more that is not built ahead
STEP_S = 0.01


def replay(prompt: Sequence[int], answer: Sequence[int], cost: Cost, *, drawn: bool, foresight: bool = False) -> float:
    """Tokens per time against those without guesses. cost: of a pass of so many rows, in passes of one."""
    proposer, controller = NGram(drawn=drawn), Controller()
    tokens, whole = list(prompt), [*prompt, *answer]
    proposer.follow(tokens)
    spent, ahead, unread = 0.0, False, 0
    while len(tokens) + unread < len(whole):
        most = min(MOST, len(whole) - len(tokens) - unread - 1)
        chances = proposer.chances(most + unread) if most > 0 and len(tokens) > len(prompt) else ()
        count = 0
        if chances and foresight:
            right = _right(proposer.propose(most + unread), whole[len(tokens) :]) - unread
            gains = {k: (1 + min(k, right)) / (cost(1 + k) + (0 if ahead else WAIT)) for k in range(1, right + 1)}
            count = max(gains, key=gains.__getitem__, default=0)
            count = count if count and gains[count] > 1 else 0
        elif chances:
            (count,) = controller.choose([list(accumulate(chances, mul))[unread:]])
        guesses = proposer.propose(count + unread)[unread:] if count else ()
        took = cost(1 + len(guesses)) + (0 if ahead else WAIT)
        spent += took
        if unread:  # the pass before lands meanwhile
            tokens.append(whole[len(tokens)])
            proposer.follow(tokens)
        controller.took(1, len(guesses), took * STEP_S, ahead=ahead)
        ahead = unread = not guesses
        if guesses:
            tokens += whole[len(tokens) :][: 1 + _right(guesses, whole[len(tokens) :])]
            proposer.follow(tokens)
    return len(answer) / spent


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
    parser.add_argument("--costs", type=read_costs, default="1:1,2:1.3,4:1.8,8:2.7,12:4,16:5")
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
            gains = [
                replay(prompt, answer, options.costs, drawn=temperature > 0, foresight=known) for known in (False, True)
            ]
            print(
                f"{name:8} at {temperature:g}: {len(answer):4} tokens, {gains[0]:5.2f}x, foresight {gains[1]:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
