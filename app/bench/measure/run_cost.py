"""Cost of a step that verifies draft tokens: several tokens of one sequence in one pass.

A plain step is built while the previous one runs, as in the engine. A step with draft tokens waits for it, and its
time covers building, running and reading. Rounds are interleaved; figures are medians. `bench --speculate` measures it
after its workloads.

A step that verifies K draft tokens emits one token, and one more per accepted draft token up to the first rejection.
With an acceptance rate p per draft token that is 1 + p + p^2 + ... + p^K tokens (Leviathan et al. 2023, equation 1).
If the step costs c plain steps, the speed-up of any proposer is that number / c.

Guard: tests/app/bench/test_speculation.py.
"""

import random
import time
from itertools import pairwise
from statistics import median

import mlx.core as mx

from headrace.app.bench.measure.profile import run_ahead
from headrace.app.bench.measure.records import DraftCost, RunCosts
from headrace.app.bench.stats import crossing
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.ops import select
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 15)
"""Draft tokens per step: passes of up to 16 tokens."""
ROUNDS = 15  # of each draft length, for its median
DEPTH = 256  # cached tokens: a short conversation
_STEPS = 4  # plain steps per round


def run_costs(network: object, *, depth: int = DEPTH, rounds: int = ROUNDS) -> RunCosts | None:
    """Return `run_costs` of the JSON document: milliseconds by draft length, and break-even acceptance rates.

    None for a network of mlx-lm's, which has caches of its own.
    """
    if not isinstance(network, Decoder):
        return None
    step_s = {drafts: median(times) for drafts, times in _step_times(network, depth, rounds).items()}
    plain_s = step_s[0]
    rows: list[DraftCost] = []
    for drafts in DRAFT_LENGTHS:
        cost = step_s[drafts] / plain_s
        rows.append(DraftCost(drafts, step_s[drafts] * 1e3, cost, break_even(cost, drafts)))
    return RunCosts(depth, rounds, plain_s * 1e3, rows)


def _step_times(network: Decoder, depth: int, rounds: int) -> dict[int, list[float]]:
    """Return the seconds of a step in each round, by its number of draft tokens: 0 for plain steps.

    depth: cached tokens before the first step.
    """
    draw = random.Random(0)
    greedy = select().greedy
    sampler = Sampler(SamplingParams(), vocab_size=network.vocab_size, prompt=())
    # A first round warms up. In each, one more plain step is made than is timed, since a time is between two ends. The
    # entries of a step with draft tokens are rolled back after it.
    plain_steps = (rounds + 1) * (_STEPS + 1)
    max_entries = depth + plain_steps + max(DRAFT_LENGTHS) + 1
    kv = network.kv_backend(KVOptions(max_entries))
    cache = kv.acquire([0])

    def random_tokens(count: int) -> list[int]:
        return [draw.randrange(network.vocab_size) for _ in range(count)]

    for _ in prefill(network, kv, cache, random_tokens(depth)):
        pass
    times: dict[int, list[float]] = {drafts: [] for drafts in (0, *DRAFT_LENGTHS)}
    for turn in range(rounds + 1):
        any_token = mx.array([1])  # the time of a step does not depend on it
        steps = run_ahead(network, kv, cache, sampler, any_token, _STEPS + 1)
        ends = [time.perf_counter() for _ in steps]
        times[0].append(median([end - start for start, end in pairwise(ends)]))
        # Forwards and backwards in turn: drift of the machine affects all lengths alike.
        lengths = DRAFT_LENGTHS if turn % 2 else DRAFT_LENGTHS[::-1]
        for drafts in lengths:
            rows = drafts + 1  # the last token, then the draft tokens
            tokens = mx.array(random_tokens(rows), mx.uint32)
            began = time.perf_counter()
            decode_step(network, one_pass(kv, cache, rows, "decode"), greedy, tokens, rows).tolist()
            times[drafts].append(time.perf_counter() - began)
            cache.rollback()
    cache.close()
    return {drafts: measured[1:] for drafts, measured in times.items()}  # the first round warms up


def tokens_per_step(rate: float, drafts: int) -> float:
    """Return the expected tokens of a step with so many draft tokens."""
    return sum(rate**count for count in range(drafts + 1))


def break_even(cost: float, drafts: int) -> float | None:
    """Return the acceptance rate from which a step of `cost` plain steps pays.

    None if it pays at no rate, 0 if its drafts are free.
    """
    if cost <= 1:
        return 0.0
    if cost > drafts + 1:
        return None
    return crossing(lambda rate: tokens_per_step(rate, drafts) < cost, 1.0)  # tokens grow with the rate
