"""A vocabulary as SentencePiece and GGUF number its kinds of tokens, and SentencePiece BPE's tokenizer of it.

SentencePiece merges the neighbours whose union scores best; a list of merges ranked by score does the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this


@dataclass(frozen=True)
class Vocabulary:
    """Token texts and kinds by id; no two texts are equal."""

    tokens: list[str]
    kinds: list[int]

    def ids_of(self, *kinds: int) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


def sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], *, unknown: str | None, prefix: bool
) -> "Tokenizer":
    """The tokenizer, without its added tokens. `prefix`: a text begins with a space, whether or not it has one."""
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import BPE

    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _merges_by_score(vocabulary, scores)
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefix else mark
    spell_spaces(tokenizer, prefix=prefix)
    return tokenizer


def spell_spaces(tokenizer: "Tokenizer", *, prefix: bool) -> None:
    """Let it decode marks as spaces and byte tokens as bytes, less the space that `prefix` put in front."""
    from tokenizers import decoders

    back = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)


def add_tokens(tokenizer: "Tokenizer", vocabulary: Vocabulary) -> None:
    """Control tokens match only where special tokens are asked for, user-defined ones in any text."""
    from tokenizers import AddedToken

    def added(kinds: tuple[int, ...], special: bool) -> list["AddedToken"]:
        texts = (vocabulary.tokens[index] for index in vocabulary.ids_of(*kinds))
        return [AddedToken(text, normalized=False, special=special) for text in texts]

    tokenizer.add_special_tokens(added((CONTROL, UNKNOWN), True))
    tokenizer.add_tokens(added((USER_DEFINED,), False))


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best token first.

    SentencePiece merges the neighbours whose union scores best; a ranked merge list does the same. Only tokens that
    plain text may become take part.
    """
    barred = set(vocabulary.ids_of(CONTROL, UNKNOWN, USER_DEFINED, UNUSED, BYTE))
    usable = {token: index for index, token in enumerate(vocabulary.tokens) if index not in barred}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[index], usable[left], usable[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
