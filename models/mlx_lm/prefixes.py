"""Prefix reuse between sequences of mlx-lm's caches.

Contract: `take` returns a cache whose committed entries are the first tokens of a new prompt: a copy of a running
sequence's cache, up to its prompt, or a kept cache of an ended sequence. Copies share memory until they are written to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from headrace.models.mlx_lm.cache import MlxLmCache
from headrace.runtime.kv.common_prefix import common_prefix


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """The cache of an ended sequence, and the tokens of all its entries."""

    cache: MlxLmCache
    tokens: list[int]
    nbytes: int


class PrefixCaches:
    """Caches that prompts can begin with.

    max_entries: of all kept caches; the newest is kept whatever its length. spare: bytes free for kept caches beside
    caches of so many bytes; None for no bound. can_copy: False if only an ended sequence's cache itself can go on.
    """

    def __init__(self, max_entries: int, spare: Callable[[int], int] | None, *, can_copy: bool) -> None:
        self._max_entries = max_entries
        self._spare = spare
        self._can_copy = can_copy
        self._kept: list[KeptSequence] = []  # the most recent last
        self._prompts: WeakKeyDictionary[MlxLmCache, list[int]] = WeakKeyDictionary()  # committed, of running ones

    def take(self, prompt: Sequence[int]) -> MlxLmCache | None:
        """Return a cache with the longest available prefix of `prompt`, all tokens but the last at most, or None."""
        wanted = prompt[:-1]
        reachable = [
            (prefix.cache.reachable(common_prefix(prefix.tokens, wanted)), prefix) for prefix in reversed(self._kept)
        ]
        running = [
            (cache.reachable(common_prefix(tokens, wanted)), cache)
            for cache, tokens in list(self._prompts.items())
            if self._can_copy
        ]
        length, prefix = max(reachable, key=lambda pair: pair[0], default=(0, None))
        running_length, cache = max(running, key=lambda pair: pair[0], default=(0, None))
        if cache is not None and running_length > length:
            length = running_length
            cache = cache.duplicate()
        elif prefix is not None and length:
            ends_here = length == len(prefix.tokens) or not self._can_copy
            if ends_here:
                self._kept.remove(prefix)
            cache = prefix.cache if ends_here else prefix.cache.duplicate()
        else:
            return None
        cache.trim(length)
        return cache

    def has(self, prompt: Sequence[int]) -> bool:
        """Return whether a kept cache has entries of `prompt` only."""
        return any(prefix.tokens == list(prompt[: len(prefix.tokens)]) for prefix in self._kept)

    def add_running(self, cache: MlxLmCache, prompt: Sequence[int]) -> None:
        """Offer the committed entries, of the first of `prompt`, while the cache lives."""
        self._prompts[cache] = list(prompt[: cache.committed])

    def end(self, cache: MlxLmCache, tokens: Sequence[int], *, outputs: bool) -> None:
        """Keep the cache of an ended sequence; its committed entries are of the first of `tokens`.

        outputs: with the output's entries; else with those of a prompt that was offered, if it was.
        """
        prompt = self._prompts.pop(cache, [])
        if not outputs:
            if not prompt:
                return
            cache.trim(cache.reachable(min(len(prompt), cache.committed)))
        if not cache.committed:
            return
        cache.mark()
        own_tokens = list(tokens[: cache.committed])
        self._kept = [prefix for prefix in self._kept if prefix.tokens != own_tokens[: len(prefix.tokens)]]
        self._kept.append(KeptSequence(cache, own_tokens, cache.allocated_bytes))
        while len(self._kept) > 1 and sum(len(prefix.tokens) for prefix in self._kept) > self._max_entries:
            del self._kept[0]

    def evict(self) -> None:
        """Drop the oldest kept caches beyond the spare memory."""
        while self._kept and self._spare is not None and sum(prefix.nbytes for prefix in self._kept) > self._spare(0):
            del self._kept[0]

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()
        self._prompts.clear()

    def __iter__(self) -> Iterator[KeptSequence]:
        return iter(self._kept)
