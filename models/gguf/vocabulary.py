"""Vocabulary of a GGUF file: token texts, their kinds, and the ids of special tokens.

`gguf.tokenizer` makes tokenizer.json of it, and `gguf.config` generation_config.json of the ids.

Guard: tests/models/gguf/test_tokenizer.py.
"""

from msgspec import Struct

from headrace.models.gguf.metadata import Metadata
from headrace.models.text.control_tokens import TURN_ENDS
from headrace.models.text.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary
from headrace.runtime.errors import CheckpointError

# Characters. The longest tokens in use are a few hundred spaces; the work per token is quadratic in this length.
_MAX_TOKEN = 1024


class SpecialIds(Struct, frozen=True):
    """Token ids with a role; None for a role that no token has."""

    bos: int | None  # begin of a text
    eos: int | None  # end of a text
    pad: int | None
    unknown: int | None  # for characters without a token
    ends: list[int]  # all ids that end a turn, the declared EOS first
    add_bos: bool  # an encoded prompt begins with `bos`
    add_eos: bool  # an encoded prompt ends with `eos`


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the tokens and their kinds. Raises CheckpointError for inconsistent lists or repeated texts."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the vocabulary is empty")
    longest = max(tokens, key=len)
    if len(longest) > _MAX_TOKEN:
        raise CheckpointError(f"a token of the vocabulary has {len(longest)} characters")
    # llama.cpp gives empty tokens such names; they are padding that never occurs in text.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    kinds = [NORMAL] * len(tokens)
    if metadata.has("tokenizer.ggml.token_type"):
        kinds = metadata.integers("tokenizer.ggml.token_type", len(tokens))
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("a token appears twice in the vocabulary")
    return Vocabulary(tokens, kinds)


def read_special_ids(metadata: Metadata, vocabulary: Vocabulary, *, add_bos: bool, is_spm: bool) -> SpecialIds:
    """Return the ids from the metadata. add_bos: the tokenizer's default. SentencePiece files may omit 0, 1 and 2."""
    defaults: dict[str, int] = {"unknown": 0, "bos": 1, "eos": 2} if is_spm and len(vocabulary.tokens) > 2 else {}

    def role(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if not metadata.has(key):
            return defaults.get(name)
        return metadata.integer(key, maximum=len(vocabulary.tokens) - 1)

    bos = role("bos")
    eos = role("eos")
    named = [index for index in vocabulary.ids_of(CONTROL, USER_DEFINED) if vocabulary.tokens[index] in TURN_ENDS]
    ends = [index for index in (eos, role("eot"), role("eom"), *named) if index is not None]
    return SpecialIds(
        bos=bos,
        eos=eos,
        pad=role("padding"),
        unknown=role("unknown"),
        ends=list(dict.fromkeys(ends)),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", add_bos) and bos is not None,
        add_eos=metadata.flag("tokenizer.ggml.add_eos_token", False) and eos is not None,
    )
