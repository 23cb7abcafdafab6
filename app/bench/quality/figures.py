"""Figures of a quality run, with 95 % intervals.

They come from a block bootstrap: neighbouring tokens are correlated, so blocks of BLOCK tokens are drawn with
replacement (Carlstein, "The Use of Subseries Values", Annals of Statistics 14(3), 1986). All conditions (depths,
phases) of a token are drawn together, since a hard passage is hard in all of them.

Guard: tests/app/bench/quality/test_figures.py.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean
from typing import Literal, TypeVar

from msgspec import Struct

from headrace.app.bench.stats import Figure, bootstrap
from headrace.models.loading.divergence import Divergence
from headrace.runtime.metrics.telemetry import quantile
from headrace.runtime.ops import Phase

BLOCK = 32  # tokens that are drawn together
TAIL = 0.99  # the quantile `kl_p99`

_Block = TypeVar("_Block")


ComparedKind = Literal["kv", "activations", "weights", "engine"]
"""`engine` for another program, which has no network here but `scores`."""


class QualityResult(Struct, frozen=True, kw_only=True):
    """An entry of `results`, see docs/quality-json.md. depth, phase: None for all conditions together."""

    variant: str
    kind: ComparedKind
    kv_bytes_per_token: float | None = None
    kv_bytes_ratio: float | None = None
    weight_bytes_per_step: float | None = None
    depth: int | None = None
    phase: Phase | None = None
    tokens_per_second: float | None = None
    tokens: int
    kl_mean: Figure
    kl_p99: Figure
    kl_max: float
    top1_agreement: Figure
    perplexity_ratio: Figure
    perplexity: float
    reference_perplexity: float


def quality_result(variant: str, kind: ComparedKind, conditions: Sequence[Divergence]) -> QualityResult:
    """Return all figures of one text in one or more conditions that score the same tokens."""
    kl = [condition.kl for condition in conditions]
    log_ratios = [
        [b - a for a, b in zip(condition.reference_nll, condition.nll, strict=True)] for condition in conditions
    ]
    reference_nll = fmean(list(chain.from_iterable(condition.reference_nll for condition in conditions)))
    nll = fmean(list(chain.from_iterable(condition.nll for condition in conditions)))
    log_ratio = mean_figure(log_ratios)
    return QualityResult(
        variant=variant,
        kind=kind,
        tokens=sum(map(len, kl)),
        kl_mean=mean_figure(kl),
        kl_p99=tail_figure(kl),
        kl_max=max(chain.from_iterable(kl)),
        top1_agreement=mean_figure([condition.agrees for condition in conditions]),
        perplexity_ratio=Figure(math.exp(log_ratio.value), _exp(log_ratio.low), _exp(log_ratio.high)),
        perplexity=math.exp(nll),
        reference_perplexity=math.exp(reference_nll),
    )


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def mean_figure(rows: Sequence[Sequence[float]]) -> Figure:
    """Return the mean of rows (conditions, tokens)."""
    blocks = [(math.fsum(block), len(block)) for block in _blocks(rows)]
    return _figure(blocks, lambda drawn: sum(total for total, _ in drawn) / sum(count for _, count in drawn))


def tail_figure(rows: Sequence[Sequence[float]]) -> Figure:
    """Return the interpolated quantile TAIL of rows (conditions, tokens)."""
    max_values = max(map(len, rows)) * len(rows)
    # Only values in the tail can become the quantile, so a block's others are dropped before each resample is sorted.
    # This is an upper bound of values at or above the quantile in any resample: one that draws a whole block in place
    # of a short last one has more values than there are, with two blocks almost twice as many. 2 more: the quantile is
    # interpolated between two neighbours.
    num_kept = math.ceil((1 - TAIL) * 2 * max_values) + 2
    blocks = [(sorted(block)[-num_kept:], len(block)) for block in _blocks(rows)]

    def tail(drawn: Sequence[tuple[list[float], int]]) -> float:
        count = sum(length for _, length in drawn)
        top = sorted(chain.from_iterable(values for values, _ in drawn))
        num_dropped = count - len(top)
        position = TAIL * (count - 1) - num_dropped  # of the quantile of all values, in `top`
        return quantile(top, max(0.0, position / max(1, len(top) - 1)))

    return _figure(blocks, tail)


def _figure(blocks: Sequence[_Block], statistic: Callable[[Sequence[_Block]], float]) -> Figure:
    return Figure(statistic(blocks), *bootstrap(blocks, statistic))


def _blocks(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Cut rows (conditions, tokens) into blocks of BLOCK tokens; the last one may be shorter."""
    length = max(map(len, rows))
    return [[value for row in rows for value in row[at : at + BLOCK]] for at in range(0, length, BLOCK)]
