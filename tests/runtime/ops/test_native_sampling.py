"""Token selection on the native kernels against a full sort in double precision."""

import mlx.core as mx
import numpy as np
import pytest

from headrace.runtime.ops import Ops, SampleRule, native, reference

pytestmark = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")

CUTS = [(0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (40, 1.0, 0.0), (0, 1.0, 0.05), (3000, 0.95, 1e-4), (5, 0.5, 0.3)]


@pytest.mark.sampled
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("ties", [False, True])
def test_sampled_tokens_match_a_full_sort(cuts: tuple[int, float, float], spread: float, ties: bool) -> None:
    """Compares the kept tokens and their shares, for a real vocabulary size."""
    top_k, top_p, min_p = cuts
    random = np.random.default_rng(int(spread * 100) + ties)
    x = (random.normal(size=20011) * spread).astype(np.float32)
    if ties:
        x = np.round(x)
    x[random.integers(0, x.size, 50)] = -np.inf
    weights = np.exp(x.astype(np.float64) - x.max())
    order = np.argsort(-x, kind="stable")[: top_k or None]
    before = np.cumsum(weights[order]) - weights[order]
    edge = top_p * weights[order].sum()
    kept = order[before < edge] if top_p < 1 else order
    kept = np.sort(kept[weights[kept] >= min_p])
    # A cut in float32 may fall on a neighbour of the same weight; what it can move is slack.
    slack = 1e-5 + 2 * float(
        weights[order[np.searchsorted(before, edge) - 1]] / weights[kept].sum() if top_p < 1 else 0
    )
    ends = np.cumsum(weights[kept]) / weights[kept].sum()
    keys = random.integers(0, 2**32, (64, 2), dtype=np.uint32)
    for key in keys:
        whole = int(key[0]) << 32 | int(key[1])
        token = native.sample(mx.array(x)[None], [SampleRule(1.0, top_k, top_p, min_p)], [whole]).item()
        place = np.searchsorted(kept, token)
        assert place < len(kept)
        assert kept[place] == token or slack > 1e-4
        assert ends[place] - weights[token] / weights[kept].sum() - slack <= whole / 2**64 <= ends[place] + slack


RULES = [SampleRule(), *(SampleRule(0.5 + 0.2 * i, *cuts) for i, cuts in enumerate(CUTS)), SampleRule(1.3)]


@pytest.mark.parametrize("ops", [native, reference])
def test_rows_with_different_rules_are_independent(ops: Ops) -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        logits = mx.array(random.normal(size=(len(RULES), 3001)).astype(np.float32) * 3)
        keys = [int(key) for key in random.integers(0, 2**64, len(RULES), dtype=np.uint64)]
        alone = [ops.sample(logits[i : i + 1], [RULES[i]], [keys[i]]).item() for i in range(len(RULES))]
        assert ops.sample(logits, RULES, keys).tolist() == alone
        order = random.permutation(len(RULES)).tolist()
        mixed = ops.sample(logits[mx.array(order)], [RULES[i] for i in order], [keys[i] for i in order])
        assert mixed.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("ops", [native, reference])
def test_a_nan_is_chosen_in_its_own_row_only(ops: Ops) -> None:
    logits = mx.array(np.random.default_rng(1).normal(size=(len(RULES), 40)).astype(np.float32))
    keys = list(range(1 << 60, (1 << 60) + len(RULES)))
    right: list[int] = ops.sample(logits, RULES, keys).tolist()  # type: ignore[assignment]
    for row in range(len(RULES)):
        spoiled = mx.array(logits)
        spoiled[row, 7] = float("nan")
        assert ops.sample(spoiled, RULES, keys).tolist() == [*right[:row], 7, *right[row + 1 :]]


def test_both_operations_sample_the_same_tokens_with_the_same_keys() -> None:
    """Except if a share of the mass ends so near to the point that float32 rounds it to the other side."""
    random = np.random.default_rng(6)
    logits = mx.array(random.normal(size=(900, 3001)).astype(np.float32) * 3)
    rules = [RULES[i % len(RULES)] for i in range(900)]
    keys = [int(key) for key in random.integers(0, 2**64, 900, dtype=np.uint64)]
    fast, stock = (np.array(ops.sample(logits, rules, keys)) for ops in (native, reference))
    assert np.mean(fast == stock) > 0.99
