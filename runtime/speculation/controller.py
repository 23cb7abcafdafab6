"""How many guesses a pass takes: what they promise, against what rows more have cost on this machine and model.

A pass of B sequences and G guesses takes r(B, G) times one without guesses. r begins as a guess itself, or as what was
remembered (`runtime.speculation.pass_costs`), and follows measured passes; the passes without, which it is relative to,
are looked at again every now and then, since the memory's speed drifts and contexts grow. What the pass behind one with
guesses takes longer, since it could not be built ahead, is a part of r. Nothing is measured but the passes there are,
so only a few numbers of rows are used: each is soon well known. One pass in a hundred takes many times as long for
reasons of somebody else's; a single one therefore moves r the less the more is known.
"""

import math
from collections.abc import Mapping, Sequence

from headrace.runtime.metrics.running_median import Recent

ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a pass with guesses, of all sequences
GUESSES = 30  # in a pass, of all sequences
_GAIN = 1.1  # a pass with guesses must promise so many times the tokens per second: chances are guessed as well
# Before anything was measured, of a step:
_FEW = 4  # rows that memory has time for
_OF_FEW = 0.15  # one of these more
_ROW = 0.25  # one beyond them
_WAIT = 0.15  # a pass with guesses starts when the one before it has landed, as does the one behind it
_PLAIN = 5  # passes without guesses whose median is what one takes
_LEAST = 0.06  # the weight of a new measurement of a pass with guesses, when many were seen
_KNOWN = 4  # measurements that a remembered one is worth at most: it may be stale
_FRESH = 64  # passes with guesses that a pass without is good to compare with
_LIKELY = 0.5  # a guess that is right so often is worth one of those that were refused
_DEAR = 256  # times that guesses were too dear before it is seen whether they still are
_FAR = 3.0  # times as much as expected: more is somebody else's work
_NEAR = 1.25  # of one that many passes have shown
_TICK = 1e-6  # seconds: a pass takes more, also where a coarse clock saw none of it

Costs = Mapping[tuple[int, int], tuple[float, int]]
"""(sequences, guesses) -> (r, how many passes that rests on)"""


class _Curve:
    """r(B, G) for one B: measured where there were passes, in between and beyond as those would have it."""

    def __init__(self, sequences: int, remembered: Costs) -> None:
        self._sequences = sequences
        counts = [rows - sequences for rows in ROWS if 0 < rows - sequences <= GUESSES]
        self._prior = {guesses: _WAIT + _rows(sequences + guesses) / _rows(sequences) for guesses in counts}
        self._plain = Recent(_PLAIN)
        self.age = 0  # passes with guesses since the newest without
        self.forget()
        known = {guesses: remembered[sequences, guesses] for guesses in counts if (sequences, guesses) in remembered}
        self._expected = _bent(self._prior, {guesses: ratio for guesses, (ratio, _) in known.items()})
        self._worth = {guesses: min(seen, _KNOWN) for guesses, (_, seen) in known.items()}
        self._settle(self._expected)

    def forget(self) -> None:
        """Nothing of passes with guesses was seen, here or before."""
        self._expected = self._prior
        self._worth = dict[int, int]()  # passes that what is remembered is worth
        self._settle(self._prior)
        self.seen = dict.fromkeys(self._prior, 0)
        self.refused = 0

    @property
    def plain_s(self) -> float | None:
        return self._plain.median

    def plain(self, seconds: float) -> None:
        self._plain.add(max(seconds, _TICK))
        self.age = 0

    def late(self, seconds: float) -> float:
        """What a pass without took longer than they do: it was not started ahead."""
        return max(0.0, seconds - self.plain_s) if self.plain_s is not None else 0.0

    def guessed(self, guesses: int, seconds: float) -> None:
        self.age += 1
        if self.plain_s is None or guesses not in self.ratios:
            return
        before, seen = self.ratios[guesses], self.seen[guesses] + self._worth.get(guesses, 0)
        far = max(_NEAR, 1 + (_FAR - 1) / math.sqrt(1 + seen))
        measured = max(before / far, min(seconds / self.plain_s, before * far))
        self.ratios[guesses] = max(1.0, before + max(_LEAST, 1 / (2 + seen)) * (measured - before))
        self.seen[guesses] += 1
        self._settle(_bent(self._expected, {at: self.ratios[at] for at, seen in self.seen.items() if seen}))

    def _settle(self, ratios: Mapping[int, float]) -> None:
        """Hold r, and `least`: what guesses' chances have to be on average for a pass to pay; from 1 on none does."""
        self.ratios = dict(ratios)
        needed = (self._sequences * (_GAIN * ratio - 1) / guesses for guesses, ratio in ratios.items())
        self.least = min(needed, default=math.inf)


def _rows(count: int) -> float:
    """What a pass of so many rows takes before anything was measured, in steps of one."""
    return 1 + _OF_FEW * (min(count, _FEW) - 1) + _ROW * max(0, count - _FEW)


def _bent(expected: Mapping[int, float], measured: Mapping[int, float]) -> dict[int, float]:
    """What was measured, and what was not: as expected, but as much dearer as what was measured on either side."""
    bent = {**expected, **measured}
    for guesses in expected.keys() - measured.keys() if measured else ():
        sides = {
            max((at for at in measured if at < guesses), default=min(measured)),
            min((at for at in measured if at > guesses), default=max(measured)),
        }
        dearer = sum((measured[at] - 1) / max(expected[at] - 1, _WAIT) for at in sides) / len(sides)
        bent[guesses] = 1 + (expected[guesses] - 1) * dearer
    return bent


class Controller:
    """One engine's. remembered: what was `known` when an engine like it was here before."""

    def __init__(self, remembered: Costs | None = None) -> None:
        self._remembered = remembered or {}
        self._curves: dict[int, _Curve] = {}
        self._before: tuple[int, int, float] | None = None  # the newest pass, if it had guesses
        self.passes = 0  # with guesses

    def took(self, sequences: int, guesses: int, seconds: float, *, ahead: bool) -> None:
        """So long for a pass of decoding sequences. ahead: it was started before the one before it had landed."""
        curve = self._curve(sequences)
        if self._before is not None:
            of, count, took_s = self._before
            late_s = curve.late(seconds) if (sequences, guesses, ahead) == (of, 0, False) else 0.0
            self._curve(of).guessed(count, took_s + late_s)
        self._before = (sequences, guesses, seconds) if guesses else None
        if guesses:
            self.passes += 1
        elif ahead:
            curve.plain(seconds)

    def pays(self, sequences: int, chance: float, price_s: float = 0.0) -> bool:
        """Whether guesses could, of which none is likelier than `chance`; looked at before each of them is."""
        curve = self._curve(sequences)
        if curve.plain_s is None or curve.age >= _FRESH:
            return False
        if chance > curve.least + _GAIN * sequences * price_s / curve.plain_s:
            return True
        curve.refused += chance > _LIKELY
        return curve.refused >= _DEAR

    def choose(self, promises: Sequence[Sequence[float]], price_s: float = 0.0) -> list[int]:
        """How many guesses each sequence gets, where a guess costs `price_s` before it is verified.

        promises: for each sequence, of its guesses in order, that they are accepted.
        """
        sequences = len(promises)
        counts = [0] * sequences
        curve = self._curve(sequences)
        if curve.plain_s is None or curve.age >= _FRESH:
            return counts
        # Of one sequence they fall, so the best of all are of each a beginning.
        ordered = sorted(((promise, row) for row, own in enumerate(promises) for promise in own), reverse=True)
        best, taken, said, price = _GAIN, 0, float(sequences), price_s / curve.plain_s
        for guesses, (promise, _) in enumerate(ordered[:GUESSES], 1):
            said += promise
            if guesses not in curve.ratios:
                continue
            gain = said / (sequences * (curve.ratios[guesses] + guesses * price))
            if gain > best:
                best, taken = gain, guesses
        if not taken and said > (1 + _LIKELY) * sequences:
            curve.refused += 1
            if curve.refused >= _DEAR:
                curve.forget()
                taken = min(curve.ratios, default=0)
        for _, row in ordered[:taken]:
            counts[row] += 1
        return counts

    @property
    def known(self) -> Costs:
        """What passes with guesses have taken, of so many sequences as there were."""
        return {
            (sequences, guesses): (curve.ratios[guesses], seen)
            for sequences, curve in self._curves.items()
            for guesses, seen in curve.seen.items()
            if seen
        }

    def _curve(self, sequences: int) -> _Curve:
        if sequences not in self._curves:
            self._curves[sequences] = _Curve(sequences, self._remembered)
        return self._curves[sequences]
