"""Tokenizers with byte strings by rank: Mistral's tekken.json, and tiktoken files.

Two neighbours merge if their union is a token, the lowest rank first, so ranks define the merges. tekken.json states
the pattern that splits words. tiktoken files leave it to model code, which is never run here, so the patterns of
known families are listed.

tests/models/text/test_other_formats.py guards this.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from headrace.models.checkpoint.json_object import read_json_object
from headrace.models.checkpoint.side_file import read_side_file
from headrace.models.text.detokenizer import spelled
from headrace.models.text.tokenizers_library import LARGEST_ID
from headrace.models.text.vocabulary import NORMAL, Vocabulary, merges_by_score
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

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
