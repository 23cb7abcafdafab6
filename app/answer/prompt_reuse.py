"""Prompt tokens found in the KV cache: how many, since when, and the reason why there are not more.

`app/engine/host.py` keeps a `ReuseLog` and explains each prompt when its prefill begins. The chat's decode view shows
the result, and so does a server's response to a request with `headrace: {"explain": true}`.

Guards: tests/models/text/test_prefix_difference.py.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.models.text.prefix_difference import PrefixDifference, first_difference
from headrace.runtime.errors import HeadraceError
from headrace.runtime.kv.common_prefix import common_prefix

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer

_MAX_EARLIER = 8  # earlier sequences that a prompt is compared with


class PromptReuse(Struct, frozen=True):
    """Reuse of one prompt, in tokens.

    reused: found in the cache.
    prefetched: those of them computed before it was sent, while it was typed.
    dropped: equal to an earlier sequence's and not in the cache: evicted, or between marks of a recurrent state.
    difference: from the most similar earlier sequence; None if one begins with the other, or there is none.
    """

    reused: int
    prefetched: int = 0
    dropped: int = 0
    difference: PrefixDifference | None = None


class ReuseLog:
    """Tokens of recent sequences of one engine. `explain` compares a prompt with them."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._earlier: deque[list[int]] = deque(maxlen=_MAX_EARLIER)
        self._prefetched: Sequence[int] = ()  # the newest prompt that was prefetched, as far as it was
        self._prefetched_from = 0  # its tokens that were in the cache before the prefetches since the last answer

    def answered(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a sequence that ended."""
        self._earlier.append(list(tokens))
        self._prefetched = ()

    def prefetched(self, prompt: Sequence[int], reused: int, end: int) -> None:
        """Note a prompt that was prefetched up to `end`; reused: tokens that had been in the cache."""
        # A longer draft of the same prompt finds the tokens that the prefetch of the shorter one computed. They count
        # as prefetched, too, so the earlier start stays. After an answer there is no earlier start.
        if self._prefetched:
            self._prefetched_from = min(self._prefetched_from, reused)
        else:
            self._prefetched_from = reused
        self._prefetched = list(prompt[:end])

    def explain(self, prompt: Sequence[int], reused: int) -> PromptReuse:
        """Return the reuse of a prompt; reused: its tokens found in the cache."""
        # Tokens of this prompt that its prefetch computed: those that it found itself do not count.
        prefetched = 0
        if self._prefetched:
            prefetched = min(reused, common_prefix(self._prefetched, prompt)) - self._prefetched_from

        # The newest of the sequences that share the longest prefix. A step feeds the last token, which is never reused.
        nearest = max(reversed(self._earlier), key=lambda tokens: common_prefix(tokens, prompt), default=[])
        dropped = min(common_prefix(nearest, prompt), len(prompt) - 1) - reused
        difference: PrefixDifference | None = None
        with suppress(HeadraceError):  # of a tokenizer: an answer does not fail for want of an explanation
            difference = first_difference(nearest, prompt, self._tokenizer)
        return PromptReuse(reused, max(0, prefetched), max(0, dropped), difference)
