"""Reuse of the last sequence's cache for a prompt with the same beginning.

Contract: `take` returns a cache whose committed entries are the first tokens of the new prompt. `keep` gets it back
with its tokens.
"""

from collections.abc import Sequence

from headrace.runtime.kv.cache import KVCache
from headrace.runtime.kv.common_prefix import common_prefix


class KeptCache:
    """At most one cache and the token ids of its committed entries."""

    def __init__(self) -> None:
        self._cache: KVCache | None = None
        self._tokens: list[int] = []

    def take(self, prompt: Sequence[int]) -> KVCache | None:
        """Return the kept cache, trimmed to its common prefix with `prompt`; None, and drop it, if there is none.

        At most len(prompt) - 1 entries stay: the first step feeds the prompt's last token.
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

    def keep(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Keep `cache`, nothing pending; its committed entries are of the first of `tokens`."""
        if cache.committed:
            cache.mark()
            self._cache, self._tokens = cache, list(tokens[: cache.committed])

    def clear(self) -> None:
        """Drop the cache."""
        self._cache, self._tokens = None, []
