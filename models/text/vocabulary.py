"""Vocabularies with token kinds numbered as in SentencePiece and GGUF, and the BPE tokenizer of one.

SentencePiece merges the neighbours whose union has the best score, which equals merges ranked by score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from headrace.runtime.errors import CheckpointError

# Kinds of tokens.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPECIAL = (CONTROL, UNKNOWN)  # kinds that match on request only
SPACE_MARK = "\u2581"  # SentencePiece's space
_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
# Of a token's id and of its rank by score: three fit a number. `gguf.header` and `sentencepiece_model` refuse the files
# of larger vocabularies.
_ID_BITS = 21
_PLACE_BITS = 23  # of a place in the joined text of all tokens
# The limit for all tokens together. Each character needs 100 bytes; Gemma's tokens have 1.4 million
_MAX_CHARACTERS = 1 << _PLACE_BITS

Places = npt.NDArray[np.int64]
"""Positions in a text, or in an array."""


@dataclass(frozen=True)
class Vocabulary:
    """Token texts and kinds by id; texts are unique."""

    tokens: list[str]
    kinds: list[int]

    def ids(self) -> dict[str, int]:
        """Return the tokens' ids by text."""
        return {token: index for index, token in enumerate(self.tokens)}

    def ids_of(self, *kinds: int) -> list[int]:
        """Return the ids of the tokens of some kinds, in order."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], *, unknown: str | None, prefix: bool
) -> Tokenizer:
    """Return the tokenizer without its added tokens. prefix: add a space at the beginning of every text."""
    merges = zip(*merges_by_score(vocabulary, scores), strict=True)
    tokenizer = Tokenizer(character_bpe(unknown, vocab=vocabulary.ids(), merges=list(merges)))
    mark_spaces(tokenizer, prefix=prefix)
    spell_spaces(tokenizer, prefix=prefix)
    return tokenizer


def character_bpe(unknown: str | None, **more: Any) -> BPE:
    """Return BPE that begins with characters; others become byte tokens, or the unknown token. more: see `BPE`."""
    return BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True, **more)


def mark_spaces(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """Normalize spaces to marks. prefix: see `sentencepiece_bpe`."""
    mark = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = mark
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark])


def spell_spaces(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """Decode marks as spaces and byte tokens as bytes, without the space that `prefix` added."""
    back = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)


def add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add control tokens, which match only on request, and user-defined ones, which match in any text."""

    def added(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        texts = (vocabulary.tokens[index] for index in vocabulary.ids_of(*kinds))
        return [AddedToken(text, normalized=False, special=special) for text in texts]

    tokenizer.add_special_tokens(added(SPECIAL, True))
    tokenizer.add_tokens(added((USER_DEFINED,), False))


def merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> tuple[list[str], list[str]]:
    """Return every split of a token into two others, best token first, for tokens that plain text may contain.

    All tokens stand one after another in one text, and its parts are looked up by their hashes: a vocabulary of 256,000
    tokens has more than a million splits. The left parts and the right parts are two lists: half a million pairs would
    keep the garbage collection busy.
    Raises CheckpointError for a vocabulary beyond any in use.
    """
    # The tokens that may be merged, their places in the text of all, and their hashes in order.
    tokens = vocabulary.tokens
    barred = set(vocabulary.ids_of(CONTROL, UNKNOWN, USER_DEFINED, UNUSED, BYTE))
    ids = np.array([index for index in range(len(tokens)) if index not in barred], np.int64)
    usable = [tokens[index] for index in ids.tolist()]
    lengths = np.array([len(token) for token in usable], np.int64)
    if lengths.sum() > _MAX_CHARACTERS:
        raise CheckpointError(f"the tokens of the vocabulary have {lengths.sum()} characters")
    text = _HashedText("".join(usable))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hashes = text.hashes(starts, ends)
    by_hash = np.argsort(hashes)
    sorted_hashes = hashes[by_hash]

    def find(first: Places, last: Places) -> Places:
        """Return the index in `ids` of the token that each part of the text may be, -1 for none."""
        wanted = text.hashes(first, last)
        # A search in order reads each part of the memory once. Numbers of a hash's high bits and a place sort faster
        # than an argsort.
        low = np.uint64((1 << _PLACE_BITS) - 1)
        order = np.sort(wanted & ~low | np.arange(len(wanted), dtype=np.uint64)) & low
        at = np.empty(len(wanted), np.int64)
        at[order] = np.searchsorted(sorted_hashes, wanted[order])
        at = np.minimum(at, len(sorted_hashes) - 1)
        return np.where(sorted_hashes[at] == wanted, by_hash[at], -1)

    # Every place within a token where it can be cut in two, and the tokens that both parts are, if they are any.
    whole = np.repeat(np.arange(len(ids)), lengths)
    cuts = np.arange(len(whole))
    is_inside = cuts != starts[whole]
    cuts = cuts[is_inside]
    whole = whole[is_inside]
    right = find(cuts, ends[whole])
    left = np.full(len(cuts), -1)
    left[right >= 0] = find(starts[whole][right >= 0], cuts[right >= 0])
    is_merge = left >= 0

    # One number for each merge, which sorts faster than three: rank by score, left, right.
    rank = np.unique(-np.asarray(scores, np.float64)[ids], return_inverse=True)[1][whole[is_merge]]
    keys = (rank << 2 * _ID_BITS) | (ids[left[is_merge]] << _ID_BITS) | ids[right[is_merge]]
    order = np.argsort(keys)
    mask = (1 << _ID_BITS) - 1
    texts = np.array(tokens, object)
    lefts = texts[keys[order] >> _ID_BITS & mask]
    rights = texts[keys[order] & mask]
    # Different texts may have the same hash
    is_equal = np.asarray(lefts + rights == texts[ids[whole[is_merge]][order]], bool)
    return lefts[is_equal].tolist(), rights[is_equal].tolist()


class _HashedText:
    """Hashes of parts of a text: sums of characters times powers of a base, modulo 2^64.

    A part's sum is the difference of two sums from the text's beginning. Its powers are those of its place, which the
    inverse of the base takes away: the same characters have the same hash everywhere.
    """

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)
        powers = _powers(_HASH_BASE, len(codes))
        self._inverses = _powers(pow(_HASH_BASE, -1, 1 << 64), len(codes) + 1)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * powers, out=self._sums[1:])

    def hashes(self, starts: Places, ends: Places) -> npt.NDArray[np.uint64]:
        """Return the hash of each part."""
        return (self._sums[ends] - self._sums[starts]) * self._inverses[starts]


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the powers 0, 1, ... of a base, modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)
