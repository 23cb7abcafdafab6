"""Tokenizers from SentencePiece's tokenizer.model. Needs the sentencepiece package and protobuf.

`other_formats` calls `read_sentencepiece`; tests/models/text/test_other_formats.py compares with the package's own ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from tokenizers.models import Unigram

from headrace.models.checkpoint.side_file import read_side_file
from headrace.models.text.tokenizers_library import check_added, check_charsmap, keep_byte_names, library_errors
from headrace.models.text.vocabulary import (
    BYTE,
    SPECIAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    add_tokens,
    mark_spaces,
    sentencepiece_bpe,
    spell_spaces,
)
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Kinds of vocabulary, as the file numbers them.
_UNIGRAM = 1
_BPE = 2
_LARGEST = 32 << 20  # bytes of a file: those in use have up to 5 MB
_FIELD = b"\n"  # first byte of a piece, and of its text
_MOST_FIELDS = 1 << 20  # a limit, as pieces expand when they are parsed
# The score of a byte's token is _SPELLING times a score that is _BELOW the least one. Its name, such as <0x0A>, has six
# characters, and a score is a log probability, at most 0: six pieces with the least score are better. _BELOW is for
# vocabularies whose scores are all 0.
_SPELLING = 8
_BELOW = 20
_NAMES = frozenset("<0x123456789ABCDEF>")  # characters of these names
_LONGEST = 1024  # characters of a token; the work per token is quadratic in it


def read_sentencepiece(file: Path, added: Mapping[int, Mapping[str, object]]) -> tuple[Tokenizer, dict[str, object]]:
    """Return the tokenizer and an equivalent tokenizer_config.json.

    added: tokens outside the file by id. Raises CheckpointError for a broken file, UnsupportedModelError for an
    unsupported kind of vocabulary or missing packages.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file.name} needs the sentencepiece package", hint="pip install 'headrace[tokenizers]'"
        ) from error

    # The file, and refusals.
    model = sentencepiece_model_pb2.ModelProto()
    try:
        content = read_side_file(file, _LARGEST)
        if content.count(_FIELD) > _MOST_FIELDS:
            raise ValueError
        model.ParseFromString(content)
    except Exception as error:  # DecodeError, and other errors in other releases of protobuf
        raise CheckpointError(f"{file.name} is neither a SentencePiece nor a tiktoken vocabulary") from error
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    vocabulary = Vocabulary([piece.piece for piece in model.pieces], [piece.type for piece in model.pieces])
    if not all(isinstance(token, str) for token in vocabulary.tokens):  # bytes if they are not UTF-8
        raise CheckpointError(f"{file.name}: a token is no text")
    if not vocabulary.tokens or len(set(vocabulary.tokens)) != len(vocabulary.tokens):
        raise CheckpointError(f"{file.name}: the vocabulary is empty or has a token twice")
    if max(map(len, vocabulary.tokens)) > _LONGEST:
        raise CheckpointError(f"{file.name}: a token has more than {_LONGEST} characters")
    added_texts = [vocabulary.tokens[index] for index in vocabulary.ids_of(*SPECIAL, USER_DEFINED)]
    added_texts += [str(entry.get("content")) for entry in added.values()]
    with library_errors(f"{file.name} cannot be used"):
        check_added(added_texts)
    if trainer.treat_whitespace_as_suffix:
        raise UnsupportedModelError(f"{file.name} is a SentencePiece vocabulary with spaces after its words")

    # The tokenizer.
    scores = [piece.score for piece in model.pieces]
    unknown = next(iter(vocabulary.ids_of(UNKNOWN)), None)
    prefix = normalizer.add_dummy_prefix
    if trainer.model_type == _BPE:
        name = None if unknown is None else vocabulary.tokens[unknown]
        tokenizer = sentencepiece_bpe(vocabulary, scores, unknown=name, prefix=prefix)
    elif trainer.model_type == _UNIGRAM:
        tokenizer = _unigram(vocabulary, scores, unknown, prefix)
    else:
        raise UnsupportedModelError(f"{file.name} is a SentencePiece vocabulary of words or characters")
    _normalize(tokenizer, normalizer)
    add_tokens(tokenizer, vocabulary)
    _add(tokenizer, added, file)

    # The configuration: the roles of tokens.
    roles = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    named = {role: vocabulary.tokens[i] for role, i in roles.items() if 0 <= i < len(vocabulary.tokens)}
    return tokenizer, {**named, "add_bos_token": "bos_token" in named}


def _unigram(vocabulary: Vocabulary, scores: list[float], unknown: int | None, prefix: bool) -> Tokenizer:
    """Return the tokenizer of a unigram vocabulary. unknown, prefix: see `sentencepiece_bpe`."""
    # The library finds a byte's token by its name in a text, too. With the score `last` the name's own characters win,
    # unless one of them is unknown: the library gives those 10 less than the least score, which then is `last`.
    characters_win = _NAMES.issubset(vocabulary.tokens)
    if characters_win:
        last = _SPELLING * (min(scores) - _BELOW)
        of_bytes = set(vocabulary.ids_of(BYTE))
        scores = [last if index in of_bytes else score for index, score in enumerate(scores)]
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    tokenizer = Tokenizer(Unigram(pieces, unk_id=unknown, byte_fallback="<0x00>" in vocabulary.tokens))
    mark_spaces(tokenizer, prefix=prefix)
    spell_spaces(tokenizer, prefix=prefix)
    if not characters_win:
        keep_byte_names(tokenizer)
    return tokenizer


def _normalize(tokenizer: Tokenizer, spec: Any) -> None:
    """Set the normalizer: the vocabulary's replacement table, and single spaces if it asks for them."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        with library_errors("the tokenizer's normalizer cannot be read"):
            check_charsmap(spec.precompiled_charsmap)
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])


def _add(tokenizer: Tokenizer, added: Mapping[int, Mapping[str, object]], file: Path) -> None:
    """Add tokens outside the vocabulary, each under the id that the checkpoint states."""
    tokens: list[AddedToken] = []
    for _, entry in sorted(added.items()):
        content = entry.get("content")
        if not isinstance(content, str) or not 0 < len(content) <= _LONGEST:
            raise CheckpointError(f"tokenizer_config.json: {content!r:.40} is no token")
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        tokens.append(AddedToken(content, normalized=bool(entry.get("normalized", False)), **options))
    tokenizer.add_tokens(tokens)  # all at once: the library makes its search table anew for each call
    for index, token in zip(sorted(added), tokens, strict=True):
        if tokenizer.token_to_id(token.content) != index:
            raise CheckpointError(f"{token.content!r:.40} would not be token {index} of {file.name}")
