"""Cost of a step that verifies draft tokens: several tokens of one sequence in one pass.

A plain step is built while the previous one runs, as in the engine. A step with draft tokens waits for it, and its
time covers building, running and reading. Rounds are interleaved; figures are medians. With an acceptance rate the
cost gives the speed-up of any proposer.
"""

import random
import time
from itertools import pairwise
from statistics import median

import mlx.core as mx

from headrace.app.bench.measure.profile import run_ahead
from headrace.app.bench.measure.records import DraftCost, RunCosts
from headrace.app.predict.acceptance import DRAFT_LENGTHS, break_even
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.ops import select
from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler

ROUNDS = 15
DEPTH = 256
_STEPS = 4  # plain steps per round


def run_costs(network: object, *, depth: int = DEPTH, rounds: int = ROUNDS) -> RunCosts | None:
    """Return `run_costs` of the JSON document: seconds by draft length, and break-even acceptance rates.

    None for a network of mlx-lm's, which has caches of its own.
    """
    if not isinstance(network, Decoder):
        return None
    draw = random.Random(0)
    greedy = select().greedy
    sampler = Sampler(SamplingParams(), vocab_size=network.vocab_size, prompt=())
    limit = depth + (rounds + 1) * (_STEPS + 1) + DRAFT_LENGTHS[-1] + 8
    kv = network.kv_backend(KVOptions(limit))
    cache = kv.acquire([0])
    for _ in prefill(network, kv, cache, [draw.randrange(network.vocab_size) for _ in range(depth)]):
        pass
    times: dict[int, list[float]] = {drafts: [] for drafts in (0, *DRAFT_LENGTHS)}
    for turn in range(rounds + 1):  # the first round warms up
        ready = [time.perf_counter() for _ in run_ahead(network, kv, cache, sampler, mx.array([1]), _STEPS + 1)]
        times[0].append(median([b - a for a, b in pairwise(ready)]))
        for drafts in DRAFT_LENGTHS[:: 1 if turn % 2 else -1]:  # there and back: drift affects all lengths alike
            tokens = mx.array([draw.randrange(network.vocab_size) for _ in range(drafts + 1)], mx.uint32)
            began = time.perf_counter()
            decode_step(network, one_pass(kv, cache, drafts + 1, "decode"), greedy, tokens, drafts + 1).tolist()
            times[drafts].append(time.perf_counter() - began)
            cache.rollback()
    cache.close()
    medians = {drafts: median(values[1:]) for drafts, values in times.items()}
    costs = {drafts: medians[drafts] / medians[0] for drafts in DRAFT_LENGTHS}
    rows = [DraftCost(drafts, medians[drafts] * 1e3, cost, break_even(cost, drafts)) for drafts, cost in costs.items()]
    return RunCosts(depth, rounds, medians[0] * 1e3, rows)
