"""Figures and their intervals against numpy and simulated texts."""

import math
import random
from statistics import fmean

import numpy as np

from headrace.app.bench.quality.figures import BLOCK, Figure, mean_figure, quality_result, tail_figure
from headrace.models.loading.divergence import Divergence


def simulated(seed: int, tokens: int, likeness: float) -> list[float]:
    """Return a positive autoregressive series with mean 1."""
    draw = random.Random(seed)
    value = 0.0
    found = []
    for _ in range(tokens):
        value = likeness * value + math.sqrt(1 - likeness**2) * draw.gauss(0, 1)
        found.append(math.exp(0.5 * value - 0.125))
    return found


def test_figures_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    conditions = [
        Divergence(*[draw.exponential(size=300).tolist() for _ in range(1)],
                   (draw.random(300) < 0.9).astype(float).tolist(),
                   draw.exponential(size=300).tolist(), draw.exponential(size=300).tolist())
        for _ in range(3)
    ]  # fmt: skip
    found = quality_result("q8", "kv", conditions)
    kl = np.concatenate([np.array(condition.kl) for condition in conditions])
    ours = np.concatenate([np.array(condition.nll) for condition in conditions])
    theirs = np.concatenate([np.array(condition.reference_nll) for condition in conditions])
    assert found.tokens == 900
    assert math.isclose(found.kl_mean.value, kl.mean(), rel_tol=1e-12)
    assert math.isclose(found.kl_p99.value, np.quantile(kl, 0.99), rel_tol=1e-12)
    assert found.kl_max == kl.max()
    assert math.isclose(found.top1_agreement.value, np.mean([c.agrees for c in conditions]), rel_tol=1e-12)
    assert math.isclose(found.perplexity, math.exp(ours.mean()), rel_tol=1e-12)
    assert math.isclose(found.perplexity_ratio.value, math.exp(ours.mean() - theirs.mean()), rel_tol=1e-12)
    for name in ("kl_mean", "kl_p99", "top1_agreement", "perplexity_ratio"):
        figure = getattr(found, name)
        assert figure.low <= figure.value <= figure.high
    assert quality_result("q8", "kv", conditions) == found


def test_the_tails_interval_equals_that_of_whole_blocks() -> None:
    """The interval from the kept values equals that of whole blocks."""
    from headrace.app.bench.quality import figures as module
    from headrace.app.bench.stats import bootstrap

    values = [simulated(seed, 7 * BLOCK + 5, 0.8) for seed in range(2)]
    whole = bootstrap(module._blocks(values), lambda drawn: float(np.quantile(np.concatenate(drawn), 0.99)))
    found = tail_figure(values)
    assert np.allclose([found.low, found.high], whole, rtol=1e-12)


def test_intervals_cover_the_mean_of_correlated_tokens() -> None:
    """Most intervals of 30 texts of 768 tokens contain the mean; a bootstrap of single tokens would miss a third."""
    from headrace.app.bench.stats import bootstrap

    covered = alone = 0
    for seed in range(30):
        values = simulated(seed, 768, 0.8)
        figure = mean_figure([values])
        covered += figure.low <= 1 <= figure.high
        low, high = bootstrap(values, fmean, resamples=200)
        alone += low <= 1 <= high
    assert covered >= 26
    assert covered > alone + 3


def test_figures_of_one_token_have_no_interval() -> None:
    one = Divergence([0.5], [1.0], [2.0], [2.5])
    found = quality_result("q8", "kv", [one])
    assert found.kl_p99 == Figure(0.5, None, None)
    assert math.isclose(found.perplexity_ratio.value, math.exp(0.5))
