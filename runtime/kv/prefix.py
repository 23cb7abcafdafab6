"""Prefix reuse: the cache of the last answer, kept for a prompt that begins like it.

Contract: `take` hands out a cache whose committed entries are exactly the first tokens of the new prompt, `keep`
gets it back with the tokens that went in. In between the cache belongs to the generation: if that fails, the cache
is lost and the next one starts empty. Nothing is reused from the middle: K/V entries depend on all tokens before.
"""

from collections.abc import Sequence

from headrace.runtime.kv.cache import Cache


class Prefix:
    """At most one cache and the token ids of its committed entries."""

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._tokens: list[int] = []

    def take(self, prompt: Sequence[int]) -> Cache | None:
        """The kept cache, trimmed to what it shares with `prompt`; None (and nothing kept) if that is nothing.

        At most len(prompt) - 1 entries stay: the first step feeds the prompt's last token. A cache that forgets
        keeps what it can come back to: all of it, or a mark.
        """
        cache, tokens = self._cache, self._tokens
        self.clear()
        if cache is None:
            return None
        shared = cache.reachable(common_prefix(tokens, prompt[:-1]))
        if shared == 0:
            return None
        cache.trim(shared)
        return cache

    def keep(self, cache: Cache, sequence: Sequence[int]) -> None:
        """Remember `cache`, whose committed entries are the first tokens of `sequence`, nothing pending."""
        if cache.committed:
            cache.mark()
            self._cache, self._tokens = cache, list(sequence[: cache.committed])

    def clear(self) -> None:
        """Let go of the cache and its memory."""
        self._cache, self._tokens = None, []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)
