"""Limit on a section of the output, such as thinking: after a number of tokens its end is forced.

    open  t1 t2 ... t(budget)  close  the rest of the answer

A pure function of the output so far. `Sequence.force_next` asks before each token, and the sampler excludes all others.
tests/runtime/sampling/test_section_limit.py has real engines with tokens at the exact places.
"""

from collections.abc import Sequence

from msgspec import Struct

_HEAD = 8  # output tokens that may come before the section begins, such as line breaks


class SectionLimit(Struct, frozen=True):
    """Force the tokens `close` once the section has `budget` tokens, unless they came before.

    open: tokens that begin the section, among the first of the output; empty if the prompt begins it.
    """

    budget: int
    open: tuple[int, ...]
    close: tuple[int, ...]

    def due(self, output: int) -> bool:
        """Return whether a token after `output` output tokens may be forced."""
        return output >= self.budget

    def over(self, output: Sequence[int]) -> bool:
        """Return whether no token of the section will follow: it has ended, or did not begin."""
        start = self._start(output)
        if start is None:
            return len(output) >= _HEAD + len(self.open)
        return _find(output, self.close, start) is not None

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the token that has to follow the output; None for any."""
        start = self._start(output)
        if start is None or len(output) - start < self.budget or self.over(output):
            return None
        # The output may end with the first tokens of `close`, which are then continued.
        begun = (n for n in range(len(self.close) - 1, 0, -1) if _ends_with(output, self.close[:n], start))
        return self.close[next(begun, 0)]

    def _start(self, output: Sequence[int]) -> int | None:
        """Return the index after the tokens that begin the section; None without them."""
        if not self.open:
            return 0
        start = _find(output[: _HEAD + len(self.open)], self.open, 0)
        if start is None:
            return None
        return start + len(self.open)


def _find(tokens: Sequence[int], wanted: tuple[int, ...], start: int) -> int | None:
    """Return the first index of `wanted` at or after `start`."""
    starts = range(start, len(tokens) - len(wanted) + 1)
    return next((index for index in starts if tuple(tokens[index : index + len(wanted)]) == wanted), None)


def _ends_with(tokens: Sequence[int], wanted: tuple[int, ...], start: int) -> bool:
    """Return whether the tokens from `start` on end with `wanted`."""
    return len(tokens) - start >= len(wanted) and tuple(tokens[-len(wanted) :]) == wanted
