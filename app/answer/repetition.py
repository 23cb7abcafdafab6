"""Detection of an answer that repeats itself, exactly, by its token ids.

`Answer.take` adds the tokens of each step. Chats and `run` show `REPEATS`; nothing ends the answer for it.

Guard: tests/app/answer/test_repetition.py.
"""

from collections.abc import Sequence

REPEATED = 500
"""Number of tokens that repeat earlier ones in a row before an answer counts as repeating itself."""
LONGEST_PERIOD = 160
"""Longest repeated passage in tokens."""
REPEATS = f"the answer has repeated itself for {REPEATED} tokens; larger models do this less"
_BETWEEN = 32  # tokens between two checks: one compares up to LONGEST_PERIOD slices


class RepetitionDetector:
    """The end of one answer, as far as repetition needs it.

    repeats: True once REPEATED tokens in a row each equalled the token one period before. Tokens are checked in groups,
        so it may come up to `_BETWEEN` tokens later.
    """

    def __init__(self) -> None:
        self.repeats = False
        self._tail: list[int] = []
        self._check_at = REPEATED

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the answer."""
        if self.repeats:
            return
        self._tail.extend(tokens)
        if len(self._tail) < self._check_at:
            return
        self.repeats = period(self._tail) is not None
        del self._tail[: -(REPEATED + LONGEST_PERIOD)]  # as much as the next check needs
        self._check_at = len(self._tail) + _BETWEEN


def period(tokens: Sequence[int]) -> int | None:
    """Return the shortest period of the last REPEATED tokens, at most LONGEST_PERIOD; None if there is none."""
    for length in range(1, min(LONGEST_PERIOD, len(tokens) - REPEATED) + 1):
        # The last tokens alone rule out nearly all lengths, without slices of hundreds.
        if tokens[-1 - length] == tokens[-1] and tokens[-REPEATED:] == tokens[-REPEATED - length : -length]:
            return length
    return None
