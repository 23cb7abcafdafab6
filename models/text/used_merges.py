"""Choice of the merges of a BPE vocabulary that texts can use: one for each token.

A vocabulary with scores states no merges. Every split of a token into two others may be one, about two for each token,
but texts use a single one of them. All merges within the characters of a token precede it. Each of them was the best
pair of the whole text, so it was the best within these characters, too. They are thus merged as in a text of their
own, and the last merge there is the last one everywhere. Without the others, a tokenizer loads in half the time.

Guard: tests/models/text/test_vocabulary.py.
"""

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]  # ids, ranks and places: half the memory
Flags = npt.NDArray[np.bool_]

ID_BITS = 21  # of a token's id, and of a rank by score: three fit a number
_LONGEST = 24  # characters: the work for a token is quadratic in its length, and those in use have up to 20
_MAX_CHARACTERS = 1 << 21  # of all tokens: beyond any vocabulary in use, a choice would cost more than it saves


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
    """Return which merges texts can use.

    Others may be among them: those of tokens that no text becomes, of long tokens, and all of an enormous vocabulary.
    """
    num_merges = len(merges.made)
    if not num_merges or len(tokens.codes) > _MAX_CHARACTERS:
        return np.ones(num_merges, bool)
    num_splits = np.bincount(merges.made, minlength=int(tokens.ids.max()) + 1)
    is_examined = np.zeros(len(num_splits), bool)
    is_examined[tokens.ids[tokens.lengths <= _LONGEST]] = True
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
    return left.astype(np.int64) << ID_BITS | right
