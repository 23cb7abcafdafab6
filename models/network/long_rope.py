"""LongRoPE (arXiv:2402.13753) as its models were trained: short factors up to the original context, long ones beyond.

The factors follow from a sequence's whole length. Keys of one list are invalid once the other list applies: all tokens
are then fed again, as in transformers. Used by `long_rope_decoder`, and for mlx-lm's classes by
`models.mlx_lm.network`.

Guards: tests/parity/test_transformers.py and tests/models/mlx_lm/test_long_rope.py.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

from headrace.runtime.kv.cache import KVCache

CHUNK = 512  # tokens of a pass that feeds a sequence again


class _Fed(NamedTuple):
    """Tokens that a cache has been fed, and their rotation."""

    pieces: list[mx.array]  # tokens (1, n), in order
    long: bool  # the long factors rotated its keys


class TokenHistory:
    """The tokens of each cache, and which factors rotated its keys. original: longest length of the short factors."""

    def __init__(self, original: int) -> None:
        self._original = original
        self._fed: WeakKeyDictionary[KVCache, _Fed] = WeakKeyDictionary()

    def append(self, cache: KVCache, tokens: mx.array) -> tuple[bool, list[mx.array]]:
        """Note tokens (1, T) about to be fed. Return whether they use the long factors, and what is fed again first.

        That is the pieces (1, n) of all tokens before, if the other factors have rotated their keys; else nothing.
        """
        pieces, was_long = self._fed.get(cache, _Fed([], False))
        before = first_tokens(pieces, cache.length)  # a cache may have dropped rejected draft tokens
        long = cache.length + tokens.shape[1] > self._original
        self._fed[cache] = _Fed([*before, tokens], long)
        if not before or long == was_long:
            return long, []
        return long, mx.concatenate(before, axis=1).split(tuple(range(CHUNK, cache.length, CHUNK)), axis=1)


def first_tokens(pieces: list[mx.array], length: int) -> list[mx.array]:
    """Return the first `length` tokens of pieces (1, T)."""
    first: list[mx.array] = []
    for piece in pieces:
        if length <= 0:
            break
        first.append(piece[:, :length])
        length -= piece.shape[1]
    return first
