"""Token selection on the native kernels against a sort of everything, in double precision."""

import mlx.core as mx
import numpy as np
import pytest

from headrace.runtime.ops import native

pytestmark = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")

CUTS = [(0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (40, 1.0, 0.0), (0, 1.0, 0.05), (3000, 0.95, 1e-4), (5, 0.5, 0.3)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("ties", [False, True])
def test_what_the_kernels_draw_is_what_a_sort_of_everything_says(
    cuts: tuple[int, float, float], spread: float, ties: bool
) -> None:
    """The kept tokens and the share of each, in double precision, for a real vocabulary."""
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
        point = (int(key[0]) << 32 | int(key[1])) / 2**64
        token = native.sample(mx.array(x)[None], mx.array(key), 1.0, top_k, top_p, min_p).item()
        place = np.searchsorted(kept, token)
        assert place < len(kept)
        assert kept[place] == token or slack > 1e-4
        assert ends[place] - weights[token] / weights[kept].sum() - slack <= point <= ends[place] + slack
