"""The distribution under speculation: joint frequencies of three tokens against enumeration, with a G-test.

The model is a table of next-token logits. A deliberately biased acceptance rule fails the same test.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from headrace.runtime.sampling.params import SamplingParams
from headrace.runtime.sampling.sampler import Sampler, choose
from headrace.runtime.speculation.proposer import num_accepted

VOCAB = 5
LENGTH = 3
PROMPT = [1, 1, 4]
DRAWS = 500  # enough for the biased rule; more are a matter of time: tests/bench/speculation_draws.py
_noise = np.random.default_rng(11).normal(0, 1.2, [VOCAB + 1, VOCAB + 1, VOCAB]).astype(np.float32)
STAGES = {
    "temperature": SamplingParams(temperature=1.3),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, logit_bias={2: 0.7}
    ),
    "all": SamplingParams(0.8, 4, 0.9, 0.05, 1.2, 0.2, 0.3, {0: 0.5}),
}
Draft = Callable[[Sequence[int]], list[int]]
Rule = Callable[[Sequence[int], Sequence[int]], int]


def logits(output: Sequence[int]) -> np.ndarray:
    before = [VOCAB, VOCAB, *output]
    return _noise[before[-1], before[-2]]


def probabilities(params: SamplingParams, output: Sequence[int]) -> np.ndarray:
    """Apply the documented stages in numpy."""
    row = logits(output).astype(np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    counts = Counter(output)
    for token in range(VOCAB):
        if counts[token] or token in PROMPT:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
    row /= params.temperature
    order = np.argsort(-row)
    kept = list(order[: params.top_k or VOCAB])
    mass = np.exp(row[kept]) / np.exp(row[kept]).sum()
    kept = [token for token, before in zip(kept, np.cumsum(mass) - mass, strict=True) if before < params.top_p]
    kept = [token for token in kept if math.exp(row[token] - row[order[0]]) >= params.min_p]
    found = np.zeros(VOCAB)
    found[kept] = np.exp(row[kept])
    return found / found.sum()


def joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every three tokens."""
    found = {}
    for output in product(range(VOCAB), repeat=LENGTH):
        found[output] = math.prod(probabilities(params, output[:i])[output[i]] for i in range(LENGTH))
    return found


def answers(params: SamplingParams, count: int, draft: Draft, rule: Rule) -> Counter[tuple[int, ...]]:
    """Run many sequences as the engine does: rows through each one's own sampler, accepted by `rule`."""
    open_ = [
        (Sampler(SamplingParams(**{**vars_of(params), "seed": seed}), vocab_size=VOCAB, prompt=PROMPT), list[int]())
        for seed in range(count)
    ]
    found: Counter[tuple[int, ...]] = Counter()
    while open_:
        drafts = [draft(output)[: LENGTH - len(output) - 1] for _, output in open_]
        rows = [
            logits([*output, *own[:i]])
            for (_, output), own in zip(open_, drafts, strict=True)
            for i in range(len(own) + 1)
        ]
        chosen: list[int] = choose([sampler for sampler, _ in open_], mx.array(np.stack(rows)), drafts).tolist()  # type: ignore[assignment]
        row = 0
        still = []
        for (sampler, output), own in zip(open_, drafts, strict=True):
            tokens = chosen[row : row + 1 + len(own)]
            row += len(tokens)
            tokens = tokens[: 1 + rule(tokens, own)]
            sampler.commit(len(tokens))
            output += tokens
            if len(output) < LENGTH:
                still.append((sampler, output))
            else:
                found[tuple(output)] += 1
        open_ = still
    return found


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def passes(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Run a G-test at about 1e-4, rare outcomes merged (Wilson-Hilferty chi-square quantile)."""
    total = sum(found.values())
    if any(not expected[output] for output in found):
        return False
    common = {output: chance for output, chance in expected.items() if chance * total >= 8}
    observed = [found[output] for output in common]
    wanted = [chance * total for chance in common.values()]
    if (rest := total - sum(wanted)) > 1e-6 * total:
        observed.append(total - sum(observed))
        wanted.append(rest)
    g = 2 * sum(o * math.log(o / w) for o, w in zip(observed, wanted, strict=True) if o)
    free = max(1, len(wanted) - 1)
    return g < free * (1 - 2 / (9 * free) + 3.72 * math.sqrt(2 / (9 * free))) ** 3


_draw = random.Random(3)


def of_the_prompt(output: Sequence[int]) -> list[int]:
    """Draft like an n-gram: the same tokens after the same token."""
    return [(output[-1] + 1) % VOCAB if output else 2, 3]


def of_a_draft(_said: Sequence[int]) -> list[int]:
    """Draft at random, often wrong."""
    return [_draw.choice([0, 0, 1, 2, 3, 4]) for _ in range(2)]


def lenient(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """Accept draft tokens that are off by one: a biased rule."""
    right = 0
    for token, drafted in zip(chosen, drafts, strict=False):
        if abs(token - drafted) > 1:
            break
        right += 1
    return right


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "draft"), [*((stage, of_a_draft) for stage in STAGES), ("all", of_the_prompt)])
def test_joint_frequencies_are_the_models(stage: str, draft: Draft) -> None:
    assert passes(answers(STAGES[stage], DRAWS, draft, num_accepted), joint(STAGES[stage]))


def test_a_biased_acceptance_rule_is_detected() -> None:
    assert not passes(answers(STAGES["temperature"], DRAWS, of_the_prompt, lenient), joint(STAGES["temperature"]))
