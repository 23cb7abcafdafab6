"""Vocabularies with token kinds numbered as in SentencePiece and GGUF, and the BPE tokenizer of one.

SentencePiece merges the neighbours whose union has the best score, which equals merges ranked by score.

Guard: tests/models/text/test_vocabulary.py.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
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
_UNMERGED = (CONTROL, UNKNOWN, USER_DEFINED, UNUSED, BYTE)  # kinds that merges neither make nor take
_ID_BITS = 21  # of a token's id, and of a rank by score: three fit a number
_LONGEST_EXAMINED = 24  # characters: the work for a token is quadratic in its length, and those in use have up to 20
_MAX_EXAMINED = 1 << 21  # of all tokens: beyond any vocabulary in use, a choice would cost more than it saves
_CODE_BITS = 21  # of a character
# The limit for all tokens together. Each character needs up to 60 bytes, or 150 where merges are chosen. Gemma's tokens
# have 1.4 million.
_MAX_CHARACTERS = 1 << 23
_PAIRS_AT_ONCE = 1 << 16  # whose ids are Python numbers at the same time, which take 40 bytes each

Integers = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]  # ids, ranks and places: half the memory
Flags = npt.NDArray[np.bool_]


class Vocabulary(Struct, frozen=True):
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
    merges = list(merges_by_score(vocabulary, scores))
    tokenizer = Tokenizer(character_bpe(unknown, vocab=vocabulary.ids(), merges=merges))
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
    if prefix:
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)


def add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add control tokens, which match only on request, and user-defined ones, which match in any text."""

    def added(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        texts = (vocabulary.tokens[index] for index in vocabulary.ids_of(*kinds))
        return [AddedToken(text, normalized=False, special=special) for text in texts]

    tokenizer.add_special_tokens(added(SPECIAL, True))
    tokenizer.add_tokens(added((USER_DEFINED,), False))


def merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Return the splits of tokens into two others, best token first, for tokens that plain text may contain.

    Splits that no text uses are left out. The pairs are made one by one: hundreds of thousands at once would keep the
    garbage collection busy. Raises CheckpointError for a vocabulary beyond any in use.
    """
    # The tokens that may be merged, and their places in the text of all, one after another.
    tokens = vocabulary.tokens
    kinds = vocabulary.kinds
    if len(tokens) >= 1 << _ID_BITS:
        raise CheckpointError(f"the vocabulary has {len(tokens)} tokens")
    ids = np.array([index for index, text in enumerate(tokens) if text and kinds[index] not in _UNMERGED], np.int64)
    usable = [tokens[index] for index in ids.tolist()]
    lengths = np.fromiter(map(len, usable), np.int64, len(usable))
    if lengths.sum() > _MAX_CHARACTERS:
        raise CheckpointError(f"the tokens of the vocabulary have {lengths.sum()} characters")
    codes = np.frombuffer("".join(usable).encode("utf-32-le"), "<u4").astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths

    # The tokens that each token's beginnings and endings are. It can be cut after a character up to which it is one,
    # if it is one again from the next character on.
    beginning = _tokens_along(codes, starts, lengths, step=1)
    beginning[ends - 1] = -1  # the whole token: nothing is left for the right part
    ending = _tokens_along(codes, ends - 1, lengths, step=-1)
    cuts = np.flatnonzero((beginning[:-1] >= 0) & (ending[1:] >= 0))
    left = ids[beginning[cuts]].astype(np.int32)
    right = ids[ending[cuts + 1]].astype(np.int32)
    made = np.repeat(np.arange(len(ids), dtype=np.int32), lengths)[cuts]  # places in `ids`
    del beginning, ending, cuts  # tens of megabytes for a large vocabulary

    # One number for each merge, which sorts faster than three: rank by score, left, right.
    rank = np.unique(-np.asarray(scores, np.float64)[ids], return_inverse=True)[1]
    keys = rank[made] << 2 * _ID_BITS
    keys |= left.astype(np.int64) << _ID_BITS
    keys |= right
    order = np.argsort(keys)
    del keys
    merges = Merges(left[order], right[order], ids.astype(np.int32)[made[order]])
    used = used_merges(merges, Tokens(ids, lengths, codes))
    length_of = np.zeros(len(tokens), np.int32)
    length_of[ids] = lengths
    return _halves(tokens, merges.made[used], length_of[merges.left[used]])


def _halves(tokens: list[str], made: Small, cuts: Small) -> Iterator[tuple[str, str]]:
    """Yield the texts of tokens in two parts. made: their ids; cuts: characters of the first part.

    The best tokens often have the lowest ids: their texts follow each other in memory, those of the parts do not.
    """
    for begin in range(0, len(made), _PAIRS_AT_ONCE):
        part = slice(begin, begin + _PAIRS_AT_ONCE)
        texts = map(tokens.__getitem__, made[part].tolist())
        yield from ((text[:cut], text[cut:]) for text, cut in zip(texts, cuts[part].tolist(), strict=True))


def _tokens_along(codes: Integers, first: Integers, lengths: Integers, *, step: int) -> Integers:
    """Return, for each character of a text of tokens, which token the part of its own token up to there is; -1: none.

    codes: the text's characters.
    first: the index where each token begins, or with step -1 its last character, from where the parts grow to the left.
    lengths: of the tokens.
    step: 1 or -1, from a part to the next longer one.
    """
    tokens = np.full(len(codes), -1)
    longer = np.flatnonzero(lengths)  # the tokens of at least `length` characters
    part = np.zeros(len(longer), np.int64)  # a number for the part of each of them so far, the same for equal parts
    length = 1
    while len(longer):
        positions = first[longer] + step * (length - 1)
        # A longer part is the number of the one before and a character; equal ones get one number again.
        part = np.unique(part << _CODE_BITS | codes[positions], return_inverse=True)[1]
        is_whole = lengths[longer] == length
        token_of = np.full(len(longer), -1)
        token_of[part[is_whole]] = longer[is_whole]
        tokens[positions] = token_of[part]
        longer = longer[~is_whole]
        part = part[~is_whole]
        length += 1
    return tokens


class Merges(NamedTuple):
    """Ids of two tokens and of the token that they become, for each merge, the best one first."""

    left: Small
    right: Small
    made: Small


class Tokens(NamedTuple):
    """The tokens that merges take and make."""

    ids: Integers
    lengths: Integers  # in characters
    codes: Integers  # characters of all tokens, one after the other


def used_merges(merges: Merges, tokens: Tokens) -> Flags:
    """Return which merges texts can use: one for each token.

    Every split of a token into two others may be a merge, about two for each token, but texts use a single one of them.
    All merges within the characters of a token precede it. Each of them was the best pair of the whole text, so it was
    the best within these characters, too. They are thus merged as in a text of their own, and the last merge there is
    the last one everywhere. Without the others, a tokenizer loads in half the time.

    Others may be among them: those of tokens that no text becomes, of long tokens, and all of an enormous vocabulary.
    """
    num_merges = len(merges.made)
    if not num_merges or len(tokens.codes) > _MAX_EXAMINED:
        return np.ones(num_merges, bool)
    num_splits = np.bincount(merges.made, minlength=int(tokens.ids.max()) + 1)
    is_examined = np.zeros(len(num_splits), bool)
    is_examined[tokens.ids[tokens.lengths <= _LONGEST_EXAMINED]] = True
    is_examined &= num_splits > 1
    used = ~is_examined[merges.made]

    # The texts of all examined tokens side by side: tokens so far, the text of each, and the best merge of each with
    # the next one. A character that is no token has the id -1, which no merge takes.
    examined = is_examined[tokens.ids]
    lengths = tokens.lengths[examined]
    is_character = np.repeat(tokens.lengths == 1, tokens.lengths)
    id_of = np.full(int(tokens.codes.max()) + 1, -1, np.int32)
    id_of[tokens.codes[is_character]] = tokens.ids[tokens.lengths == 1]
    parts = id_of[tokens.codes[np.repeat(examined, tokens.lengths)]]
    text_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    ranks = _Ranks(merges)
    rank = ranks.at(parts, text_of, np.arange(len(parts)))

    # One merge in each text at a time, until two parts become the token or no merge fits.
    while len(parts):
        starts = np.flatnonzero(np.diff(text_of, prepend=-1))
        sizes = np.diff(starts, append=len(parts))
        best = np.minimum.reduceat(rank, starts)
        is_best = np.flatnonzero(rank == np.repeat(best, sizes))
        first = is_best[np.flatnonzero(np.diff(text_of[is_best], prepend=-1))]  # the leftmost one of each text
        has_merge = best < num_merges
        used[best[has_merge & (sizes == 2)]] = True

        goes_on = has_merge & (sizes > 2)
        first = first[goes_on]
        parts[first] = merges.made[best[goes_on]]
        stays = np.repeat(goes_on, sizes)
        stays[first + 1] = False
        changed = np.cumsum(stays)[first] - 1  # where `first` is among those that stay
        parts = parts[stays]
        text_of = text_of[stays]
        rank = rank[stays]
        changed = np.concatenate([changed, changed[changed > 0] - 1])
        rank[changed] = ranks.at(parts, text_of, changed)
    return used


class _Ranks:
    """Merges by the tokens that they take: a hash table, which takes less time than binary searches."""

    def __init__(self, merges: Merges) -> None:
        self._none = len(merges.made)
        num_bits = 2 + self._none.bit_length()
        self._shift = np.uint64(64 - num_bits)
        self._factor = np.uint64(secrets.randbits(64) | 1)  # nobody can choose tokens that meet in few slots
        self._slots = np.full(1 << num_bits, self._none, np.int32)
        self._keys = np.append(_key(merges.left, merges.right), -1)  # and that of no merge

        # Those that find their slot taken try the next one.
        waiting = np.arange(self._none, dtype=np.int32)
        slots = self._slots_of(self._keys[:-1])
        while len(waiting):
            is_free = self._slots[slots] == self._none
            self._slots[slots[is_free]] = waiting[is_free]
            is_out = self._slots[slots] != waiting
            waiting = waiting[is_out]
            slots = (slots[is_out] + 1) % len(self._slots)

    def at(self, parts: Small, text_of: Small, positions: Integers) -> Small:
        """Return the ranks of the merges of the parts at `positions` with the next ones in their texts.

        Where there is none, the rank is the number of merges.
        """
        ranks = np.full(len(positions), self._none, np.int32)
        following = np.minimum(positions + 1, len(parts) - 1)
        waiting = np.flatnonzero((text_of[following] == text_of[positions]) & (following > positions))
        keys = _key(parts[positions[waiting]], parts[following[waiting]])
        slots = self._slots_of(keys)
        while len(waiting):
            candidates = self._slots[slots]
            is_merge = self._keys[candidates] == keys
            ranks[waiting[is_merge]] = candidates[is_merge]
            goes_on = ~is_merge & (candidates < self._none)
            waiting = waiting[goes_on]
            keys = keys[goes_on]
            slots = (slots[goes_on] + 1) % len(self._slots)
        return ranks

    def _slots_of(self, keys: Integers) -> Integers:
        """Return the slots in which keys are looked for first."""
        return (keys.astype(np.uint64) * self._factor >> self._shift).astype(np.int64)


def _key(left: Small, right: Small) -> Integers:
    """Return a number for each pair of tokens."""
    return left.astype(np.int64) << _ID_BITS | right
