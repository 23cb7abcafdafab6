"""The number of draft tokens per pass: expected gain against measured cost on this machine and model.

Let r(B, K, L) be the duration of a pass of B sequences with K draft tokens, relative to one without, where sequences
have L cache entries on average. r starts from an estimate or a stored value (`runtime.speculation.pass_costs`) and
follows the measured passes. It includes the delay of the next pass, which cannot be queued ahead. Passes without draft
tokens are measured again regularly, since memory speed drifts. Only a few numbers of rows and powers of two of L are
told apart, so that each is soon measured. About one pass in a hundred is slow because of other processes; one outlier
moves r less the more passes were measured.

`Drafting` asks (`pays`, `gain`, `choose`, `excess`) before a pass; `BatchClock` records it afterwards. A changed
constant changes speed, never output. tests/runtime/speculation/test_controller.py has simulated machines.
"""

import math
from collections.abc import Mapping, Sequence

from headrace.runtime.metrics.running_median import RunningMedian

ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a pass with draft tokens, all sequences
GPU_ROWS = (2, 3, 5, 10, 16, 32)  # the same on a GPU: MLX's products of few rows compute 5 at once
MAX_DRAFT_PER_PASS = 30  # all sequences; with two of them the largest of ROWS
MIN_GAIN = 1.05  # expected speed-up from which draft tokens are used: chances are estimates, too
# Estimates before the first measurement, relative to a step:
_CHEAP_ROWS = 4  # rows that a step bound by memory computes almost for free
_CHEAP_ROW = 0.15  # cost of one more of these
_ROW = 0.25  # cost of one beyond them
_WAIT = 0.15  # cost of not queueing ahead: a pass with draft tokens, and the one after it, wait for the one before
_PLAIN = 31  # passes in the median of passes without draft tokens: few of them mislead while other programs run
_MIN_WEIGHT = 0.06  # of a new measurement, after many
_MAX_STORED = 4  # measurements that a stored one counts for: it may be stale
_FRESH = 64  # passes with draft tokens until one without is measured again
_LIKELY = 0.5  # acceptance chance from which a refused draft token is counted
_MAX_REFUSED = 256  # refusals until the costs are measured anew
_FIRST = 1.6  # clipping of the first measurement, relative to r: an outlier must not end drafting
_FAR = 2.0  # the same of later ones; less after each, down to _NEAR
_NEAR = 1.25
_TICK = 1e-6  # seconds; least duration of a pass, for coarse clocks

_SHORT = 1024  # cache entries that cost a pass little beside the weights

Costs = Mapping[tuple[int, int, int], tuple[float, int]]
"""(sequences, draft tokens, `size_class` of contexts) -> (r, number of passes measured)"""


def size_class(context: int) -> int:
    """Return the class of contexts of about the same cost: 0 below 1,024 entries, 1 below 2,048, and so on."""
    return (context // _SHORT).bit_length()


class _Curve:
    """r(B, K, L) for one B and one class of L, interpolated and extrapolated from the measured K.

    sequences: B.
    known: draft tokens -> r, and the number of passes measured.
    candidates: numbers of rows that passes may have.

    `ratios` has r for each K: measured, else scaled from an estimate. A change of either goes through `_set_ratios`.
    """

    def __init__(self, sequences: int, known: Mapping[int, tuple[float, int]], candidates: Sequence[int]) -> None:
        self._sequences = sequences
        counts = [rows - sequences for rows in candidates if 0 < rows - sequences <= MAX_DRAFT_PER_PASS]
        # r by draft tokens, before any measurement.
        self._prior = {count: _WAIT + _rows_cost(sequences + count) / _rows_cost(sequences) for count in counts}
        self._plain = RunningMedian(_PLAIN)  # seconds of a pass without draft tokens
        self.age = 0  # passes with draft tokens since the newest without
        self.reset()
        # The estimates of this run: stored ratios, which count for a few passes, and the prior scaled by them.
        known = {count: known[count] for count in counts if count in known}
        self._expected = _scaled(self._prior, {count: ratio for count, (ratio, _) in known.items()})
        self._weights = {count: min(passes, _MAX_STORED) for count, (_, passes) in known.items()}
        self._set_ratios(self._expected)

    def reset(self) -> None:
        """Drop all measurements of passes with draft tokens, stored ones included."""
        self._expected = self._prior  # r of numbers that are not measured
        self._weights = dict[int, int]()  # draft tokens -> passes that the stored ratio counts for
        self._set_ratios(self._prior)
        self.passes = dict.fromkeys(self._prior, 0)  # measured, by draft tokens
        self.refused = 0  # likely drafts that were refused because of their cost

    @property
    def is_suspect(self) -> bool:
        """True after so many refusals that the measured costs may be wrong."""
        return self.refused >= _MAX_REFUSED

    @property
    def plain_s(self) -> float | None:
        """Seconds of a pass without draft tokens; None before the first."""
        return self._plain.median

    def record_plain(self, seconds: float) -> None:
        """Record a pass without draft tokens that was queued ahead."""
        self._plain.add(max(seconds, _TICK))
        self.age = 0

    def delay(self, seconds: float) -> float:
        """Return the excess duration of a pass without draft tokens that was not queued ahead."""
        if self.plain_s is None:
            return 0.0
        return max(0.0, seconds - self.plain_s)

    def record(self, count: int, seconds: float) -> None:
        """Update r with a pass of `count` draft tokens."""
        self.age += 1
        if self.plain_s is None or count not in self.ratios:
            return
        before = self.ratios[count]
        passes = self.passes[count] + self._weights.get(count, 0)
        # The more passes were measured, the less an outlier may differ from r, and the less a new one counts.
        far = max(_NEAR, 1 + (_FAR - 1) / math.sqrt(1 + passes)) if passes else _FIRST
        weight = max(_MIN_WEIGHT, 1 / (2 + passes))
        measured = max(before / far, min(seconds / self.plain_s, before * far))
        self.ratios[count] = max(1.0, before + weight * (measured - before))
        self.passes[count] += 1
        known = {each: self.ratios[each] for each, passes in self.passes.items() if passes}
        self._set_ratios(_scaled(self._expected, known))

    def _set_ratios(self, ratios: Mapping[int, float]) -> None:
        """Set r, and the least mean acceptance chance at which a pass pays; above 1 none does."""
        self.ratios = dict(ratios)
        # B sequences get B + K * chance tokens, instead of B, in r times the time: solved for the chance.
        needed = (self._sequences * (MIN_GAIN * ratio - 1) / count for count, ratio in ratios.items())
        self.min_chance = min(needed, default=math.inf)


def _rows_cost(count: int) -> float:
    """Return the estimated duration of a pass of `count` rows, relative to one row."""
    return 1 + _CHEAP_ROW * (min(count, _CHEAP_ROWS) - 1) + _ROW * max(0, count - _CHEAP_ROWS)


def _scaled(expected: Mapping[int, float], measured: Mapping[int, float]) -> dict[int, float]:
    """Return the measured ratios, and expected ones scaled by the excess of their measured neighbours."""
    if not measured:
        return dict(expected)
    scaled = {**expected, **measured}
    for count in expected.keys() - measured.keys():
        # The nearest measured numbers below and above; past the ends there is one.
        below = max((each for each in measured if each < count), default=min(measured))
        above = min((each for each in measured if each > count), default=max(measured))
        neighbours = {below, above}
        factors = [(measured[each] - 1) / max(expected[each] - 1, _WAIT) for each in neighbours]
        excess = sum(factors) / len(factors)
        scaled[count] = 1 + (expected[count] - 1) * excess
    return scaled


class Controller:
    """Draft token counts for one engine's passes.

    stored: `measured` of an earlier engine of the same kind.
    rows: numbers of rows that passes may have.

    In all methods, sequences is their number in the pass, and context their mean cache entries.
    """

    def __init__(self, stored: Costs | None = None, rows: Sequence[int] = ROWS) -> None:
        self._stored = stored or {}
        self._rows = rows
        self._curves: dict[tuple[int, int], _Curve] = {}  # by sequences and class of contexts
        # The newest pass, if it had draft tokens: its curve, their number, its seconds. It is recorded with the next
        # one, whose delay is part of its cost.
        self._before: tuple[_Curve, int, float] | None = None
        self.passes = 0  # with draft tokens

    def record(self, sequences: int, count: int, seconds: float, *, ahead: bool, context: int = 0) -> None:
        """Record a decode pass.

        count: its draft tokens, of all sequences.
        seconds: its duration.
        ahead: it was queued before the one before it was done.
        """
        curve = self._curve(sequences, context)
        if self._before is not None:
            before, before_count, before_s = self._before
            self._before = None
            if curve is before and not count and not ahead:  # this pass waited for the one before
                before_s += curve.delay(seconds)
            before.record(before_count, before_s)
        if count:
            self._before = (curve, count, seconds)
            self.passes += 1
        elif ahead:
            curve.record_plain(seconds)

    def pays(self, sequences: int, chance: float, cost_s: float = 0.0, *, context: int = 0) -> bool:
        """Return whether draft tokens can pay; likely ones that cannot are counted.

        chance: their acceptance chance, at most.
        cost_s: see `Proposer`.
        """
        curve = self._curve(sequences, context)
        if curve.plain_s is None or curve.age >= _FRESH:
            return False
        # With cost_s for each of K draft tokens, a pass takes r + K * cost_s / plain_s. Solved for the chance as in
        # `_set_ratios`, K cancels out of what they add.
        proposing = MIN_GAIN * sequences * cost_s / curve.plain_s
        if chance > curve.min_chance + proposing:
            return True
        if chance > _LIKELY:
            curve.refused += 1
        # After many refusals, drafts are let through to `choose`. If it refuses them too, it drops the costs.
        return curve.is_suspect

    def choose(
        self, chances: Sequence[Sequence[float]], costs_s: Sequence[float] = (), *, context: int = 0
    ) -> list[int]:
        """Return the number of draft tokens of each sequence.

        chances: for each sequence, the cumulative acceptance chances of its draft tokens in order.
        costs_s: seconds to propose one, for each sequence; none if proposals are free.
        """
        sequences = len(chances)
        counts = [0] * sequences
        curve = self._curve(sequences, context)
        if curve.plain_s is None or curve.age >= _FRESH:
            return counts
        if not costs_s:
            costs_s = [0.0] * sequences
        # Chances fall within a sequence, so the best of all sequences are a prefix of each.
        ordered = [(chance, row) for row, row_chances in enumerate(chances) for chance in row_chances]
        ordered.sort(reverse=True)
        max_gain = MIN_GAIN
        best_count = 0
        tokens = float(sequences)  # expected of the pass
        spent_s = 0.0
        for count, (chance, row) in enumerate(ordered[:MAX_DRAFT_PER_PASS], 1):
            tokens += chance
            spent_s += costs_s[row]
            if count not in curve.ratios:
                continue
            # Tokens of this pass, over those of as many plain passes as it takes time for.
            gain = tokens / (sequences * (curve.ratios[count] + spent_s / curve.plain_s))
            if gain > max_gain:
                max_gain = gain
                best_count = count
        if not best_count and tokens > (1 + _LIKELY) * sequences:
            # Likely tokens are refused because of the costs. After many such passes these are measured anew, beginning
            # with the fewest draft tokens.
            curve.refused += 1
            if curve.is_suspect:
                curve.reset()
                best_count = min(curve.ratios, default=0)
        for _, row in ordered[:best_count]:
            counts[row] += 1
        return counts

    def gain(self, sequences: int, chances: Sequence[float], cost_s: float = 0.0, *, context: int = 0) -> float:
        """Return the best gain in tokens per second if each of these sequences has draft tokens of such chances.

        chances: cumulative acceptance chances of a sequence's draft tokens, in order.
        cost_s: see `Proposer`.
        """
        curve = self._curve(sequences, context)
        tokens = 1.0
        best = 0.0
        for count, chance in enumerate(chances, 1):
            tokens += chance
            ratio = curve.ratios.get(count * sequences)
            if ratio is not None and curve.plain_s is not None:
                best = max(best, tokens / (ratio + sequences * count * cost_s / curve.plain_s))
        return best

    def excess(self, sequences: int, count: int, *, context: int = 0) -> float:
        """Return the cost of `count` draft tokens in a pass, relative to a pass without."""
        ratios = self._curve(sequences, context).ratios
        nearest = min((each for each in ratios if each >= count), default=max(ratios))
        return ratios[nearest] - 1

    @property
    def measured(self) -> Costs:
        """Measured costs of passes with draft tokens."""
        return {
            (sequences, count, size): (curve.ratios[count], passes)
            for (sequences, size), curve in self._curves.items()
            for count, passes in curve.passes.items()
            if passes
        }

    def _curve(self, sequences: int, context: int) -> _Curve:
        """Return the curve of such passes. A new one starts from those of the nearest contexts, as if measured once."""
        wanted_size = size_class(context)
        key = sequences, wanted_size
        if key not in self._curves:
            costs: list[tuple[int, int, float, int]] = []  # distance of sizes, draft tokens, r, passes
            for (num_sequences, count, size), (ratio, passes) in {**self._stored, **self.measured}.items():
                if num_sequences == sequences:
                    costs.append((abs(size - wanted_size), count, ratio, passes))
            costs.sort(key=lambda cost: cost[0], reverse=True)
            known: dict[int, tuple[float, int]] = {}
            for distance, count, ratio, passes in costs:  # the nearest contexts come last, and replace others
                known[count] = (ratio, passes if distance == 0 else 1)
            self._curves[key] = _Curve(sequences, known, self._rows)
        return self._curves[key]
