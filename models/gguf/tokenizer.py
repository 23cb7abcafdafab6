"""Conversion of a GGUF vocabulary to a Hugging Face tokenizer and its `tokenizer_config.json`.

Four kinds: byte-level BPE ("gpt2"), SentencePiece BPE with scores and byte fallback ("llama", Gemma's, too), BPE of
characters with merges and byte fallback (Gemma 4, Sarvam), and the longest token at each place ("rwkv"). All give
llama.cpp's token ids, except that plain text never becomes a control token.

Guard: tests/models/gguf/test_tokenizer.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
from msgspec.structs import replace
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.pretokenizers import PreTokenizer, pre_tokenizer
from headrace.models.gguf.vocabulary import SpecialIds, read_special_ids
from headrace.models.text.detokenizer import spelled
from headrace.models.text.longest_match import longest_match
from headrace.models.text.vocabulary import (
    BYTE,
    NORMAL,
    SPECIAL,
    USER_DEFINED,
    Vocabulary,
    character_bpe,
    mark_spaces,
    merges_by_score,
    spell_spaces,
)
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.machine.background import run_in_background

# "\xe4": its digits; "\n" and others: the character
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_OF_CHARACTERS = ("gemma4", "sarvam-moe")  # pre-tokenizers of BPE over characters


def build_tokenizer(metadata: Metadata, vocabulary: Vocabulary) -> tuple[bytes, SpecialIds]:
    """Return tokenizer.json of a GGUF file. Raises UnsupportedModelError for an unsupported kind."""
    # Each kind decides the ids with a role, the rules of the library, and how merges are made.
    model = metadata.text("tokenizer.ggml.model")
    pre = metadata.text("tokenizer.ggml.pre", "default") if model == "gpt2" else ""
    if model == "gemma4" or pre in _OF_CHARACTERS:
        special = read_special_ids(metadata, vocabulary, add_bos=model == "gemma4", is_spm=False)
        rules = _characters(_unknown(vocabulary, special))
        make_merges = partial(_stated_merges, metadata, vocabulary)
    elif model == "gpt2":
        rule = pre_tokenizer(pre)
        special = read_special_ids(metadata, vocabulary, add_bos=rule.add_bos, is_spm=False)
        rules = _byte_level(rule)
        make_merges = partial(_stated_merges, metadata, vocabulary)
    elif model == "llama":
        special = read_special_ids(metadata, vocabulary, add_bos=True, is_spm=True)
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        rules = _sentencepiece(_unknown(vocabulary, special), prefix)
        scores = metadata.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
        make_merges = partial(merges_by_score, vocabulary, scores)
    elif model == "rwkv":
        vocabulary = _unescaped_tokens(vocabulary)
        special = read_special_ids(metadata, vocabulary, add_bos=False, is_spm=False)
        rules = longest_match(vocabulary.tokens[index] for index in vocabulary.ids_of(NORMAL))
        make_merges = partial(iter, ())  # the longest token at each place is taken
    else:
        raise UnsupportedModelError(
            f"the tokenizer {model!r} is not supported",
            hint="look for an MLX or safetensors version of this model" if model == "plamo2" else None,
        )
    _wrap(rules, vocabulary, special)
    # Merges by score take numpy's time, which leaves Python free.
    with run_in_background(make_merges) as merges:
        return _document(rules, vocabulary, merges), special


def _unescaped_tokens(vocabulary: Vocabulary) -> Vocabulary:
    """Return a vocabulary whose tokens of text are spelled as byte-level ones. Raises CheckpointError.

    The file has them as Python writes byte strings: `\\n`, `\\xe4`.
    """
    tokens = [
        spelled(_ESCAPE.sub(_byte, token.encode())) if kind == NORMAL else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("two tokens of the vocabulary have the same bytes")
    return replace(vocabulary, tokens=tokens)


def _byte(match: re.Match[bytes]) -> bytes:
    """Return the byte that an escape stands for."""
    if match[1]:
        return bytes([int(match[1], 16)])
    return _ESCAPED.get(match[2], match[2])


def _unknown(vocabulary: Vocabulary, special: SpecialIds) -> str | None:
    """Return the text of the token for unknown characters, if there is one."""
    return None if special.unknown is None else vocabulary.tokens[special.unknown]


def _document(rules: Tokenizer, vocabulary: Vocabulary, merges: Callable[[], Iterable[tuple[str, str]]]) -> bytes:
    """Return tokenizer.json with the tokens and merges in place of none. merges: called once, last.

    They do not pass through the library, which takes seconds to read and write them. Merges are texts "left right",
    which load faster than pairs, unless a part contains a space. Tokens are sorted: the library reads them into a
    sorted tree first, which takes a third of its time in another order.
    """
    document = msgspec.json.decode(rules.to_str())
    model = document["model"]
    model["vocab"] = msgspec.Raw(msgspec.json.encode(vocabulary.ids(), order="sorted"))
    special = set(vocabulary.ids_of(*SPECIAL))
    document["added_tokens"] = [
        {
            "id": index,
            "content": vocabulary.tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": index in special,
        }
        for index in vocabulary.ids_of(*SPECIAL, USER_DEFINED)
    ]
    pairs = list(merges())
    texts = [f"{left} {right}" for left, right in pairs]
    has_spaces = "".join(texts).count(" ") > len(texts)
    model["merges"] = pairs if has_spaces else texts
    return msgspec.json.encode(document)


def tokenizer_config(vocabulary: Vocabulary, special: SpecialIds, context_length: int) -> dict[str, object]:
    """Return `tokenizer_config.json` for transformers and mlx-lm, without the chat template, which has its own file."""
    named = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "unk_token": special.unknown,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": special.add_bos,
        "add_eos_token": special.add_eos,
        **{name: vocabulary.tokens[index] for name, index in named.items() if index is not None},
    }


def _byte_level(rule: PreTokenizer) -> Tokenizer:
    """Return the rules of byte-level BPE."""
    tokenizer = Tokenizer(BPE(ignore_merges=rule.whole_words))
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters(unknown: str | None) -> Tokenizer:
    """Return the rules of BPE over characters, which never joins text and line breaks."""
    tokenizer = _sentencepiece(unknown, prefix=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    return tokenizer


def _sentencepiece(unknown: str | None, prefix: bool) -> Tokenizer:
    """Return the rules of SentencePiece's BPE. prefix: a text begins with a space."""
    tokenizer = Tokenizer(character_bpe(unknown))
    mark_spaces(tokenizer, prefix=prefix)
    spell_spaces(tokenizer, prefix=prefix)
    return tokenizer


def _stated_merges(metadata: Metadata, vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the left and right parts of the merges, except those that make a control token or a byte's."""
    tokens = set(vocabulary.tokens)
    unmade = {vocabulary.tokens[index] for index in vocabulary.ids_of(*SPECIAL, BYTE)}
    for text in metadata.texts("tokenizer.ggml.merges"):
        # The separator is the first space after the first character: byte-level texts contain no other.
        cut = text.find(" ", 1)
        left = text[:cut]
        right = text[cut + 1 :]
        if cut < 0 or left not in tokens or right not in tokens or left + right not in tokens:
            raise CheckpointError(f"the merge {text[:40]!r} names a token that is not in the vocabulary")
        if left + right not in unmade:
            yield left, right


def _wrap(tokenizer: Tokenizer, vocabulary: Vocabulary, special: SpecialIds) -> None:
    """Add the begin and end tokens that the file asks for, when encoding with special tokens."""
    template = ["$A"]
    specials = []
    for name, index, wanted in (("bos", special.bos, special.add_bos), ("eos", special.eos, special.add_eos)):
        if wanted and index is not None:
            specials.append({"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]})
            template.insert(0 if name == "bos" else len(template), name)
    if specials:
        pair = [*template, *(piece.replace("$A", "$B") for piece in template)]
        tokenizer.post_processor = TemplateProcessing(single=template, pair=pair, special_tokens=specials)
