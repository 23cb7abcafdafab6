"""Vocabularies with token kinds numbered as in SentencePiece and GGUF, and the BPE tokenizer of one.

SentencePiece merges the neighbours whose union has the best score, which equals merges ranked by score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPECIAL = (CONTROL, UNKNOWN)  # kinds that match on request only
SPACE_MARK = "\u2581"  # SentencePiece's space


@dataclass(frozen=True)
class Vocabulary:
    """Token texts and kinds by id; texts are unique."""

    tokens: list[str]
    kinds: list[int]

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def ids_of(self, *kinds: int) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], *, unknown: str | None, prefix: bool
) -> Tokenizer:
    """Return the tokenizer without its added tokens. prefix: add a space at the beginning of every text."""
    merges = merges_by_score(vocabulary, scores)
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
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefix else mark


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


def merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of a token into two others, best token first, for tokens that plain text may contain."""
    barred = set(vocabulary.ids_of(CONTROL, UNKNOWN, USER_DEFINED, UNUSED, BYTE))
    usable = {token: index for index, token in enumerate(vocabulary.tokens) if index not in barred}
    id_of = usable.get
    ranked: list[tuple[float, int, int]] = []
    for token, index in usable.items():
        rank = -scores[index]
        for cut in range(1, len(token)):
            right = id_of(token[cut:])
            if right is None:  # a third of all cuts, whose left parts are not looked up
                continue
            left = id_of(token[:cut])
            if left is not None:
                ranked.append((rank, left, right))
    ranked.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in ranked]
