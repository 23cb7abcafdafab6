"""Tokenizers from formats other than tokenizer.json, built in memory at each start.

`Tokenizer.load` calls `read_other_format` for a directory without a tokenizer.json. `longest_match` has RWKV's format,
which GGUF files have, too.

tests/models/text/test_other_formats.py compares ids with those of each format's own package.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from headrace.models.checkpoint.side_file import has_side_file, read_json_object, read_side_file, without_nulls
from headrace.models.text.detokenizer import spelled
from headrace.models.text.longest_match import read_world
from headrace.models.text.tokenizers_library import (
    LARGEST_ID,
    check_added,
    check_charsmap,
    keep_byte_names,
    library_errors,
)
from headrace.models.text.vocabulary import (
    BYTE,
    NORMAL,
    SPECIAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    add_tokens,
    mark_spaces,
    merges_by_score,
    sentencepiece_bpe,
    spell_spaces,
)
from headrace.runtime.errors import CheckpointError, UnsupportedModelError


def read_other_format(directory: Path, config: Mapping[str, object]) -> tuple[Tokenizer, dict[str, object]]:
    """Return (the tokenizer, its tokenizer_config.json or an equivalent). config: the existing one, or empty.

    Raises UnsupportedModelError if there is no supported file, CheckpointError for a broken one.
    """
    try:
        file = directory / "tekken.json"
        if file.is_file():
            usual = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
            return read_tekken(file), usual | without_nulls(config)
        worlds = sorted(directory.glob("rwkv_vocab_*.txt"))
        if worlds:
            return read_world(worlds[-1], _added(directory, config)), without_nulls(config)
        models = [directory / "tokenizer.model", *sorted(directory.glob("*.tiktoken")), directory / "tiktoken.model"]
        file = next((file for file in models if file.is_file()), directory)
        if file is directory:
            raise UnsupportedModelError(
                f"no tokenizer.json in {directory}",
                hint="nor a tokenizer.model, a tekken.json, a tiktoken or RWKV vocabulary: fetch the whole repository",
            )
        if is_tiktoken(file):  # a tokenizer.model may be one, too
            ends: dict[str, object] = {}
            if config.get("tokenizer_class") == "QWenTokenizer":
                ends["eos_token"] = "<|im_end|>"
            return read_tiktoken(file, config), ends | without_nulls(config)
        tokenizer, usual = read_sentencepiece(file, _added(directory, config))
        return tokenizer, usual | without_nulls(config)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be read: {error.strerror}") from error


def _added(directory: Path, config: Mapping[str, object]) -> dict[int, Mapping[str, object]]:
    """Return tokens outside the vocabulary file by id, from tokenizer_config.json or an older added_tokens.json."""
    stated = config.get("added_tokens_decoder")
    if isinstance(stated, Mapping):
        numbered = {index: entry for index, entry in stated.items() if index.isdecimal() and len(index) < 10}
        return {int(index): entry for index, entry in numbered.items() if isinstance(entry, Mapping)}
    file = directory / "added_tokens.json"
    if not has_side_file(file):
        return {}
    document = read_json_object(file)
    return {index: {"content": text, "special": True} for text, index in document.items() if type(index) is int}


# --- byte strings by rank: Mistral's tekken.json, and tiktoken files -------------------------------------------
#
# Two neighbours merge if their union is a token, the lowest rank first, so ranks define the merges. tekken.json states
# the pattern that splits words. tiktoken files leave it to model code, which is never run here, so the patterns of
# known families are listed.

_LONGEST = 1024  # bytes of a token; the work per token is quadratic in it
_LARGEST = 16 << 20  # bytes of a file: vocabularies in use have up to 4 MB
_DIGITS = 10  # of a number in a text that are read: more are out of range in any case
_MOST_CONTROLS = 1 << 14  # control tokens: a file may only state how many, and those in use have up to 1,000
_TEKKEN_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip  # of versions that do not list them

# Parts of word patterns: a character before a word, English endings such as 's, all that is no word or number; letters
# that are capitals, and those that are not, each without Chinese ones.
_WORD = r"[^\r\n\p{L}\p{N}]?"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# tokenizer_class of tokenizer_config.json: its word pattern.
_PATTERNS = {
    "QWenTokenizer": rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}",
    "TikTokenTokenizer": (
        rf"[\p{{Han}}]+|{_WORD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST}"
    ),
}
_QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def read_tekken(file: Path) -> Tokenizer:
    """Return the tokenizer of a tekken.json: control tokens, then byte strings. CheckpointError for a broken file."""
    # The file's facts.
    content = read_json_object(file)
    config = content.get("config")
    entries = content.get("vocab")
    if not isinstance(config, dict) or not isinstance(entries, list):
        raise CheckpointError(f"{file.name} has no config or no vocabulary")
    pattern = config.get("pattern")
    size = config.get("default_vocab_size")
    controls = config.get("default_num_special_tokens")
    # `type`, here and below: to `isinstance`, JSON's true would be a number, too.
    if not isinstance(pattern, str) or type(size) is not int or type(controls) is not int or not 0 < controls < size:
        raise CheckpointError(f"{file.name}: config states no pattern or no sizes")
    _check_controls(controls, file)

    # Control tokens by rank, then byte strings: their ranks begin after the control tokens'.
    listed = content.get("special_tokens")
    if not isinstance(listed, list) or not listed:
        listed = [{"rank": i, "token_str": t} for i, t in enumerate(_TEKKEN_SPECIALS)]
    entries_by_rank = [entry for entry in listed if isinstance(entry, dict) and type(entry.get("rank")) is int]
    named = {entry["rank"]: entry.get("token_str") for entry in entries_by_rank}
    specials = {_text(named.get(rank, f"<SPECIAL_{rank}>"), file): rank for rank in range(controls)}
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[: size - controls]):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise CheckpointError(f"{file.name}: entry {rank} of the vocabulary is not in its place")
        ranks[_decoded(entry.get("token_bytes"), file)] = rank + controls
    return _build(ranks, pattern, specials, file)


def read_tiktoken(file: Path, config: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer of a tiktoken file. config: the tokenizer_config.json that names the family.

    Raises UnsupportedModelError for an unknown family or missing control tokens.
    """
    kind = config.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in _PATTERNS:
        raise UnsupportedModelError(
            f"{file.name} is a tiktoken vocabulary of {kind!r:.40}, whose word pattern is unknown",
            hint=f"take a version of the model with a tokenizer.json; known are {', '.join(_PATTERNS)}",
        )
    ranks: dict[bytes, int] = {}
    for line in _lines(file):
        token, _, rank = line.partition(b" ")
        if not rank.strip().isdigit():
            raise CheckpointError(f"{file.name} is no tiktoken vocabulary")
        ranks[_decoded(token.decode("ascii", "replace"), file)] = int(rank.strip()[:_DIGITS])

    # Control tokens, after the byte strings. Those of a Qwen are listed here.
    added = config.get("added_tokens_decoder")
    named = dict(added) if isinstance(added, Mapping) else {}
    specials: dict[str, int] = {}
    if kind == "QWenTokenizer":
        specials = {text: len(ranks) + i for i, text in enumerate(_QWEN_SPECIALS)}
    elif named:
        texts = {
            int(index[:_DIGITS]): entry.get("content") if isinstance(entry, Mapping) else None
            for index, entry in named.items()
            if index.isdecimal()
        }
        end = max([len(ranks) + 256, *(index + 1 for index in texts)])
        _check_controls(end - len(ranks), file)
        for index in range(len(ranks), end):
            specials[_text(texts.get(index, f"<|reserved_token_{index}|>"), file)] = index
    else:
        raise UnsupportedModelError(f"{file.name}: tokenizer_config.json names no control tokens")
    tokenizer = _build(ranks, _PATTERNS[kind], specials, file)
    if kind == "QWenTokenizer":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def is_tiktoken(file: Path) -> bool:
    """Return whether a file has tiktoken's lines; a tokenizer.model is usually SentencePiece's."""
    with file.open("rb") as stream:
        token, space, rank = stream.readline(4096).rstrip().partition(b" ")
    return bool(space) and rank.isdigit() and token.isascii()


def _build(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int], file: Path) -> Tokenizer:
    """Return byte-level BPE that merges by rank.

    ranks: ids of byte strings, in the order of merges.
    pattern: of words, a regular expression.
    specials: ids of control tokens.
    file: for errors.
    """
    # The vocabulary, byte strings spelled in byte-level BPE's alphabet.
    ids = {spelled(token): index for token, index in ranks.items()}
    vocabulary = {**ids, **specials}
    _check_ids(vocabulary.values(), file)
    if len(set(vocabulary.values())) != len(ranks) + len(specials):
        raise CheckpointError(f"{file.name}: two tokens have the same text or number")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise CheckpointError(f"{file.name}: some bytes are no tokens")

    # Each way in which two tokens make a third one, that of the lowest rank first.
    tokens = sorted(ids, key=ids.__getitem__)
    ordered = Vocabulary(tokens, [NORMAL] * len(tokens))
    try:
        merges = list(merges_by_score(ordered, range(0, -len(tokens), -1)))
    except CheckpointError as error:  # too many tokens
        raise CheckpointError(f"{file.name}: {error}") from error

    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    try:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.name}: the pattern cannot be compiled") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    return tokenizer


def _check_controls(count: int, file: Path) -> None:
    """Raise CheckpointError for too many control tokens: those without a name of their own get one here."""
    if count > _MOST_CONTROLS:
        raise CheckpointError(f"{file.name}: more than {_MOST_CONTROLS} control tokens")


def _check_ids(ids: Iterable[int], file: Path) -> None:
    """Raise CheckpointError for a huge id: the library allocates all ids up to the largest."""
    if max(ids, default=0) >= LARGEST_ID:
        raise CheckpointError(f"{file.name}: a token has the id {max(ids)}")


def _decoded(text: Any, file: Path) -> bytes:
    """Return the bytes of a token in base64. Raises CheckpointError."""
    try:
        token = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file.name}: {text!r:.40} is not base64") from error
    if not 0 < len(token) <= _LONGEST:
        raise CheckpointError(f"{file.name}: a token has {len(token)} bytes")
    return token


def _text(value: object, file: Path) -> str:
    """Return the text of a control token. Raises CheckpointError for anything else."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST:
        raise CheckpointError(f"{file.name}: {value!r:.40} is no control token")
    return value


def _lines(file: Path) -> list[bytes]:
    """Return the lines of a tiktoken file: `TOKEN RANK`, the token in base64."""
    try:
        return [line for line in read_side_file(file, _LARGEST).splitlines() if line]
    except ValueError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from None


# --- SentencePiece's tokenizer.model; needs the sentencepiece package and protobuf -----------------------------

# Kinds of vocabulary, as the file numbers them.
_UNIGRAM = 1
_BPE = 2
_LARGEST_MODEL = 32 << 20  # bytes of a file: those in use have up to 5 MB
_FIELD = b"\n"  # first byte of a piece, and of its text
_MOST_FIELDS = 1 << 20  # a limit, as pieces expand when they are parsed
# The score of a byte's token is _SPELLING times a score that is _BELOW the least one. Its name, such as <0x0A>, has six
# characters, and a score is a log probability, at most 0: six pieces with the least score are better. _BELOW is for
# vocabularies whose scores are all 0.
_SPELLING = 8
_BELOW = 20
_NAMES = frozenset("<0x123456789ABCDEF>")  # characters of these names
_LONGEST_PIECE = 1024  # characters of a token; the work per token is quadratic in it


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
        content = read_side_file(file, _LARGEST_MODEL)
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
    if max(map(len, vocabulary.tokens)) > _LONGEST_PIECE:
        raise CheckpointError(f"{file.name}: a token has more than {_LONGEST_PIECE} characters")
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
        if not isinstance(content, str) or not 0 < len(content) <= _LONGEST_PIECE:
            raise CheckpointError(f"tokenizer_config.json: {content!r:.40} is no token")
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        tokens.append(AddedToken(content, normalized=bool(entry.get("normalized", False)), **options))
    tokenizer.add_tokens(tokens)  # all at once: the library makes its search table anew for each call
    for index, token in zip(sorted(added), tokens, strict=True):
        if tokenizer.token_to_id(token.content) != index:
            raise CheckpointError(f"{token.content!r:.40} would not be token {index} of {file.name}")
