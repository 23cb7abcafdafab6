"""Sampling on GPUs against the definition: the same tokens, for any rules, ties, masks and NaN."""

import mlx.core as mx
import numpy as np
import pytest

from headrace.runtime.ops import SampleRule
from headrace.runtime.ops.stock_sampling import sample, sample_on_gpu

CUTS = [
    (0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (20, 1.0, 0.0), (1, 1.0, 0.0), (32, 0.9, 0.0), (33, 0.9, 0.0),
    (0, 1.0, 0.05), (20, 0.8, 0.1), (5000, 0.95, 1e-4),
]  # fmt: skip
VOCABULARY = 3001


def some(rows: int, seed: int, ties: bool = False) -> tuple[mx.array, list[int]]:
    """Return logits (rows, V), a few of them excluded, and keys."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, VOCABULARY)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    logits[:, random.integers(0, VOCABULARY, 50)] = -np.inf
    return mx.array(logits), [int(key) for key in random.integers(0, 2**64, rows, dtype=np.uint64)]


@pytest.mark.sampled
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
def test_gpu_sampling_chooses_the_tokens_of_the_definition(cuts: tuple[int, float, float], ties: bool) -> None:
    rules = [SampleRule(0.8, *cuts)] * 64
    logits, keys = some(len(rules), 3, ties)
    ours, defined = (np.array(choose(logits, rules, keys)) for choose in (sample_on_gpu, sample))
    assert (ours != defined).sum() <= 1  # sums in another order may fall on the neighbour


def test_rows_have_separate_sampling_parameters() -> None:
    rules = [SampleRule(), *(SampleRule(0.5 + 0.2 * i, *cuts) for i, cuts in enumerate(CUTS)), SampleRule(1.3)]
    for seed in range(10):
        logits, keys = some(len(rules), seed)
        ours, defined = (np.array(choose(logits, rules, keys)) for choose in (sample_on_gpu, sample))
        assert (ours != defined).sum() <= 1
        assert ours[0] == defined[0]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_non_finite_logit_is_sampled_so_that_it_is_noticed(cuts: tuple[int, float, float], broken: float) -> None:
    logits, keys = some(3, 1)
    logits[1, 77] = broken
    rules = [SampleRule(0.8, *cuts)] * 3
    defined = sample(logits, rules, keys).tolist()
    assert sample_on_gpu(logits, rules, keys).tolist()[1] == defined[1] == 77


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_needs_no_cast_before(dtype: mx.Dtype) -> None:
    logits, keys = some(64, 9)
    rules = [SampleRule(0.8, 20)] * 64
    half = logits.astype(dtype)
    ours = np.array(sample_on_gpu(half, rules, keys))
    assert (ours != np.array(sample_on_gpu(half.astype(mx.float32), rules, keys))).sum() == 0
