"""Ratios from repetitions measured side by side: headrace over peers, batches over one sequence.

Speeds are paired by round, so that the machine's drift cancels out. `run.py` puts the rows into the document.

Guards: tests/app/bench/measure/test_session.py and tests/app/bench/test_views.py.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from headrace.app.bench.measure.records import Agreement, Mean, Ratio, Result, Scaling
from headrace.app.bench.stats import bootstrap, geometric_ratio


class PairedRatio(NamedTuple):
    """A ratio of speeds by round, its 95 % interval (None for fewer than two rounds), and the number of rounds."""

    ratio: float
    low: float | None
    high: float | None
    pairs: int


def ratios(results: Sequence[Result], peer: str) -> list[Ratio]:
    """Return headrace / peer for every shared test and model, paired by round, with 95 % intervals."""
    ours = {_key(entry): entry for entry in results if entry.engine == "headrace"}
    return [
        Ratio(entry.test, entry.depth, entry.model, peer, *paired_ratio(ours[_key(entry)], entry))
        for entry in results
        if entry.engine == peer and _key(entry) in ours
    ]


def paired_ratio(entry: Result, base: Result) -> PairedRatio:
    """Return the geometric mean over rounds of a test's speed over that of another."""
    # Samples stand in the order of rounds. An interrupted run may leave one test with a round more: it is not paired.
    pairs = list(zip(entry.samples, base.samples, strict=False))
    ratio, (low, high) = geometric_ratio([a for a, _ in pairs], [b for _, b in pairs])
    return PairedRatio(ratio, low, high, len(pairs))


def scaling(results: Sequence[Result]) -> list[Scaling]:
    """Compare every batch with one sequence of the same run, paired by round, with 95 % intervals.

    speedup: ratio of the total tokens per second. step_time: ratio of the times of a step, which has `batch` tokens.
    """
    alone = {_alone(entry): entry for entry in results if entry.is_single_decode}
    rows = []
    for entry in results:
        batch = entry.batch
        single = alone.get(_alone(entry))
        if batch == 1 or entry.prompt_tokens or single is None:
            continue
        ratio, low, high, pairs = paired_ratio(entry, single)
        rows.append(
            Scaling(
                test=entry.test,
                depth=entry.depth,
                model=entry.model,
                engine=entry.engine,
                batch=batch,
                speedup=Mean(ratio, low, high),
                # The bounds change places: the highest speed has the shortest step.
                step_time=Mean(batch / ratio, high and batch / high, low and batch / low),
                pairs=pairs,
            )
        )
    return rows


def agreement(results: Sequence[Result], peer: str) -> list[Agreement]:
    """Return our measurement of a peer over its own report (`own_...`) of the same repetitions.

    Tests without such reports are left out.
    """
    rows = []
    for entry in results:
        pairs = [
            (repetition.tokens_per_second, repetition.own_tokens_per_second)
            for repetition in entry.repetitions
            if repetition.own_tokens_per_second
        ]
        if entry.engine != peer or not pairs:
            continue
        low, high = bootstrap([measured / own_speed for measured, own_speed in pairs], fmean)
        rows.append(
            Agreement(
                test=entry.test,
                depth=entry.depth,
                model=entry.model,
                peer=peer,
                own_tokens_per_second=fmean([own_speed for _, own_speed in pairs]),
                measured_over_own=fmean([measured / own_speed for measured, own_speed in pairs]),
                low=low,
                high=high,
            )
        )
    return rows


def _alone(entry: Result) -> tuple[str, str, int, int]:
    """Return a key that a batch shares with the same test of one sequence."""
    return entry.engine, entry.model, entry.generated_tokens, entry.depth


def _key(entry: Result) -> tuple[str, int, str]:
    return entry.test, entry.depth, entry.model
