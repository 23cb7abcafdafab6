"""Dry runs of a sequence's draft tokens: compared with its output before passes verify them.

The gain is counted in passes without draft tokens: 1 for every draft token that equals the output, minus the excess
cost of the pass that verifies, or would verify, the draft. Draft tokens are verified while the gain is large enough, at
first only a few of them. A dry run costs no pass, and passes stay queued ahead, so a text without repetition decodes as
without speculation.

`Drafting` starts dry runs and asks `pays`; of the proposers, only n-grams have one. Constants are in passes, so they
hold for any machine. tests/runtime/speculation/test_dry_run.py guards this.
"""

from collections.abc import Sequence

_MIN_GAIN = 0.5  # passes, to begin verifying
_FIRST = 2  # draft tokens of a pass, until verified ones were accepted
_MAX_GAIN = 6.0  # passes: a text that stops repeating itself loses no more
_MAX_LOSS = 2.0  # passes that a dry run has to make up for
_QUIET = 12  # searches without a draft that could pay, for each pass of a pause
_MAX_PAUSE = 7  # passes


class DryRun:
    """Gain of one sequence's draft tokens, verified or not. Drafts are compared one after the other."""

    def __init__(self) -> None:
        self._gain = 0.0
        self._proven = False  # the newest verified draft paid
        self._draft: Sequence[int] = ()  # not compared yet
        self._at = 0  # its position
        self._cost = 0.0

    @property
    def pays(self) -> bool:
        """True if the next draft tokens are to be verified."""
        return self._gain >= _MIN_GAIN

    def max_draft(self, count: int) -> int:
        """Return how many of `count` draft tokens may be verified in the next pass."""
        return count if self._proven else min(count, _FIRST)

    @property
    def pending(self) -> bool:
        """True if the output does not decide yet on the newest draft."""
        return bool(self._draft)

    def start(self, position: int, draft: Sequence[int], cost: float) -> None:
        """Start to compare a draft from this position. cost: excess cost of its pass, in passes without a draft."""
        self._draft = draft
        self._at = position
        self._cost = cost

    def update(self, tokens: Sequence[int]) -> None:
        """Compare the draft with all tokens of prompt and answer. It ends early, once it gained enough."""
        if not self._draft:
            return
        output = tokens[self._at : self._at + len(self._draft)]
        pairs = enumerate(zip(output, self._draft, strict=False))
        num_equal = next((index for index, (token, draft) in pairs if token != draft), len(output))
        gain = self._gain + num_equal - self._cost
        if num_equal < len(output) or num_equal == len(self._draft) or gain >= _MIN_GAIN:
            # `pays` is by the gain before this draft: if true, the draft was verified, not only compared.
            self._proven = self.pays and num_equal > self._cost
            self._gain = max(-_MAX_LOSS, min(_MAX_GAIN, gain))
            self._draft = ()


class Pauses:
    """Passes without a search for draft tokens: more, the longer none could pay.

    The tokens of a pause are not lost: the next search reads all of them, which costs little more than to read one.
    """

    def __init__(self) -> None:
        self._num_quiet = 0  # searches in a row
        self._remaining = 0  # passes of this pause

    def skip(self) -> bool:
        """Count a pass; return whether it goes without a search."""
        if not self._remaining:
            return False
        self._remaining -= 1
        return True

    def record(self, *, is_quiet: bool) -> None:
        """Record a search. is_quiet: it found no draft tokens that could pay."""
        if is_quiet:
            self._num_quiet += 1
        else:
            self._num_quiet = 0
        self._remaining = min(_MAX_PAUSE, self._num_quiet // _QUIET)
