"""How many guesses a pass takes: what they promise, against what rows more have cost on this machine and model.

A pass of B sequences and G guesses takes r(B, G) times one without guesses. r begins as a guess itself and follows what
passes took; the passes without, which it is relative to, are looked at again every now and then, since the memory's
speed drifts and contexts grow. Nothing is measured but the passes there are.
"""

from collections.abc import Sequence

GAIN = 1.04  # a pass with guesses must promise so many times the tokens per second
GUESSES = 30  # in a pass, of all sequences
_ROW = 0.25  # of a step, for a row more, before anything was measured
_WAIT = 0.10  # of a step: a pass with guesses starts when the one before it has landed
_NEW = 0.2  # the weight of a new measurement
_RENEWED = 0.5  # of one after passes with guesses
_FRESH = 64  # passes with guesses that a pass without is good to compare with
_DEAR = 256  # times that guesses were too dear before it is seen whether they still are
_FAR = 3.0  # times as much as expected: more is somebody else's work


class _Curve:
    """r(B, G) for one B: measured where there were passes, in between and beyond as those would have it."""

    def __init__(self, sequences: int) -> None:
        slope = _ROW / (1 + _ROW * (sequences - 1))
        self._expected = [1.0, *(1 + _WAIT + slope * guesses for guesses in range(1, GUESSES + 1))]
        self.plain_s: float | None = None
        self.age = 0  # passes with guesses since the newest without
        self.forget()

    def forget(self) -> None:
        """Nothing of passes with guesses was seen."""
        self.ratios = list(self._expected)
        self._seen = [0] * len(self.ratios)
        self.refused = 0

    def plain(self, seconds: float) -> None:
        if self.plain_s is None:
            self.plain_s = seconds
        else:
            weight = _RENEWED if self.age else _NEW
            self.plain_s += weight * (min(seconds, _FAR * self.plain_s) - self.plain_s)
        self.age = 0

    def guessed(self, guesses: int, seconds: float) -> None:
        self.age += 1
        if self.plain_s is None:
            return
        before = self.ratios[guesses]
        measured = min(seconds / self.plain_s, _FAR * before)
        self._seen[guesses] += 1
        self.ratios[guesses] = max(1.0, before + max(_NEW, 1 / (1 + self._seen[guesses])) * (measured - before))
        self._fill()

    def _fill(self) -> None:
        """What was not measured, from what was next to it."""
        known = [0, *(guesses for guesses, seen in enumerate(self._seen) if seen)]
        for low, high in zip(known, [*known[1:], len(self.ratios)], strict=True):
            for guesses in range(low + 1, high):
                self.ratios[guesses] = self._between(guesses, low, high)

    def _between(self, guesses: int, low: int, high: int) -> float:
        """As expected of rows, but as much dearer as what was measured on either side."""
        expected = self._expected[guesses] - 1
        dearer = [(self.ratios[at] - 1) / (self._expected[at] - 1) for at in (low, high) if 0 < at < len(self.ratios)]
        return 1 + expected * sum(dearer) / len(dearer)


class Controller:
    """One engine's."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def took(self, sequences: int, guesses: int, seconds: float, *, ahead: bool) -> None:
        """So long for a pass of decoding sequences. ahead: it was started before the one before it had landed."""
        curve = self._curve(sequences)
        if guesses:
            curve.guessed(min(guesses, GUESSES), seconds)
        elif ahead:
            curve.plain(seconds)

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
        best, taken, said, price = GAIN, 0, float(sequences), price_s / curve.plain_s
        for guesses, (promise, _) in enumerate(ordered[:GUESSES], 1):
            said += promise
            gain = said / (sequences * (curve.ratios[guesses] + guesses * price))
            if gain > best:
                best, taken = gain, guesses
        if not taken and said > 1.5 * sequences:
            curve.refused += 1
            if curve.refused >= _DEAR:
                curve.forget()
                taken = 1
        for _, row in ordered[:taken]:
            counts[row] += 1
        return counts

    def _curve(self, sequences: int) -> _Curve:
        if sequences not in self._curves:
            self._curves[sequences] = _Curve(sequences)
        return self._curves[sequences]
