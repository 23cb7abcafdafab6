"""Conversion of a GGUF vocabulary to a Hugging Face tokenizer and its `tokenizer_config.json`.

Three kinds: byte-level BPE ("gpt2"), SentencePiece BPE with scores and byte fallback ("llama", Gemma's, too), and BPE
of characters with merges and byte fallback ("gemma4"). All give llama.cpp's token ids, except that merges never produce
a control token, so that plain text cannot become one.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.pretokenizers import PreTokenizer, pre_tokenizer
from headrace.models.gguf.vocabulary import SpecialIds, read_special_ids
from headrace.models.text.vocabulary import (
    CONTROL,
    SPACE_MARK,
    UNKNOWN,
    Vocabulary,
    add_tokens,
    sentencepiece_bpe,
    spell_spaces,
)
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_NO_CHAT = "headrace runs language models that write text; look for an MLX or safetensors version of one"


def build_tokenizer(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, SpecialIds]:
    """Return the tokenizer of a GGUF file. Raises UnsupportedModelError for an unsupported kind."""
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        pre = pre_tokenizer(metadata.text("tokenizer.ggml.pre", "default"))
        special = read_special_ids(metadata, vocabulary, add_bos=pre.add_bos, is_spm=False)
        tokenizer = _byte_level(metadata, vocabulary, pre)
    elif model == "llama":
        special = read_special_ids(metadata, vocabulary, add_bos=True, is_spm=True)
        tokenizer = _sentencepiece(metadata, vocabulary, special)
    elif model == "gemma4":
        special = read_special_ids(metadata, vocabulary, add_bos=True, is_spm=False)
        tokenizer = _characters(metadata, vocabulary, special)
    else:
        raise UnsupportedModelError(
            f"the tokenizer {model!r} is not supported",
            hint=_NO_CHAT if model in ("bert", "t5", "rwkv", "plamo2") else None,
        )
    add_tokens(tokenizer, vocabulary)
    _wrap(tokenizer, vocabulary, special)
    return tokenizer, special


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write tokenizer.json with merges as texts "left right", which load faster than pairs.

    Merges stay pairs if a piece contains a space.
    """
    document = json.loads(tokenizer.to_str())
    merges = document["model"]["merges"]
    if not any(" " in piece for pair in merges for piece in pair):
        document["model"]["merges"] = [" ".join(pair) for pair in merges]
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def tokenizer_config(vocabulary: Vocabulary, special: SpecialIds, context_length: int) -> dict[str, Any]:
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


def _byte_level(metadata: Metadata, vocabulary: Vocabulary, pre: PreTokenizer) -> Tokenizer:
    ids, merges = _merges(metadata, vocabulary)
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: Metadata, vocabulary: Vocabulary) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (id of each token, merges except those that make a control token)."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    control = {vocabulary.tokens[index] for index in vocabulary.ids_of(CONTROL, UNKNOWN)}
    merges = []
    for text in metadata.texts("tokenizer.ggml.merges"):
        # The separator is the first space after the first character: byte-level texts contain no other.
        cut = text.find(" ", 1)
        left = text[:cut]
        right = text[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"the merge {text[:40]!r} names a token that is not in the vocabulary")
        if left + right not in control:
            merges.append((left, right))
    return ids, merges


def _characters(metadata: Metadata, vocabulary: Vocabulary, special: SpecialIds) -> Tokenizer:
    ids, merges = _merges(metadata, vocabulary)
    unknown = None if special.unknown is None else vocabulary.tokens[special.unknown]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    spell_spaces(tokenizer, prefix=False)
    return tokenizer


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary, special: SpecialIds) -> Tokenizer:
    unknown = None if special.unknown is None else vocabulary.tokens[special.unknown]
    scores = metadata.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_bpe(vocabulary, scores, unknown=unknown, prefix=prefix)


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
