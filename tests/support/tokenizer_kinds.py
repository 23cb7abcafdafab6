"""Twenty kinds of tokenizer, each with control tokens declared in five ways.

They differ in everything that may turn a text into a control token: model (byte-level BPE, SentencePiece BPE, Unigram,
WordPiece, WordLevel), normalizers (up to SentencePiece's own tables, case folding included), and pre-tokenizers.
`write_kind` gives a model directory; `TEXTS` are texts that once produced a control token.
"""

import base64
import io
import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.corpus import NASTY

CONTROLS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_GPT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
_SPLIT = {"type": "Split", "pattern": {"Regex": _GPT}, "behavior": "Isolated", "invert": False}
_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}


def _bytes(**changes: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | changes


def _metaspace(scheme: str, split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _all(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", {"n": "normalizers", "p": "pretokenizers"}[kind]: list(parts)}


_BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
_NFKC = {"type": "NFKC"}
_LOWER = {"type": "Lowercase"}
# Name -> (model, normalizer, pre-tokenizer, changes to the model). A normalizer that is a text is SentencePiece's rule.
KINDS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "GPT-2": ("bytes", None, _bytes(), {}),
    "RoBERTa": ("bytes", None, _bytes(add_prefix_space=True), {}),
    "Llama 3": ("bytes", None, _all("p", _SPLIT, _bytes(use_regex=False)), {"ignore_merges": True}),
    "Qwen": ("bytes", {"type": "NFC"}, _all("p", _SPLIT, _bytes(use_regex=False)), {}),
    "digits": ("bytes", None, _all("p", {"type": "Digits", "individual_digits": True}, _bytes()), {}),
    "bytes of folded text": ("bytes", _all("n", _NFKC, _LOWER), _bytes(), {}),
    "bytes in one word": ("bytes", None, _bytes(use_regex=False), {"ignore_merges": True}),
    "Llama 2": ("pieces", _all("n", _PREPEND, _TO_MARK), None, {}),
    "Gemma": (
        "pieces",
        _TO_MARK,
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        {},
    ),
    "Mistral": ("pieces", None, _metaspace("first", False), {}),
    "Metaspace always": ("pieces", None, _metaspace("always"), {}),
    "Metaspace never": ("pieces", "nmt_nfkc", _metaspace("never"), {}),
    "T5": ("unigram", "nmt_nfkc", _metaspace("always"), {}),
    "folded Unigram": ("unigram", "nmt_nfkc_cf", _metaspace("always"), {}),
    "Unigram of bytes": ("unigram", _TO_MARK, None, {"byte_fallback": True}),
    "ALBERT": ("unigram", _all("n", {"type": "NFKD"}, {"type": "StripAccents"}, _LOWER), _metaspace("first"), {}),
    "BERT": ("wordpiece", _BERT, {"type": "BertPreTokenizer"}, {}),
    "WordPiece, words by spaces": ("wordpiece", _LOWER, {"type": "WhitespaceSplit"}, {}),
    "CLIP": ("bytes", _all("n", {"type": "NFC"}, _LOWER), _bytes(), {"end_of_word_suffix": "</w>"}),
    "WordLevel": ("words", _NFKC, {"type": "WhitespaceSplit"}, {}),
}
# How controls are told: added and special, added and not special (with and without being normalized), such of which the
# vocabulary has the pieces as well, and pieces alone.
DECLARED = ("special", "plain", "plain, normalized", "pieces too", "pieces")
_TEMPLATES = {
    "written out": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
    "{% endfor %}",
    "put together": "{{ bos_token }}{% for m in messages %}{{ '<|im_' + 'start|>' }} {{ m.role }} "
    "{{ m.content | trim }} {{ '<|im_' ~ 'end|>' }}{% endfor %}",
    "around": "{{ bos_token }}{% for m in messages %}<|im_start|><{{ m.content }}></{{ m.content }}>"
    "<|im_{{ m.content }}|><|im_end|>{% endfor %}",
}
_SPELLINGS = (
    *CONTROLS[1:], *(text.upper() for text in CONTROLS[1:]), "\uff1c\uff53\uff1e", "\uff1c/s\uff1e",
    "<\uff5cim_start\uff5c>", "\uff1c|IM_END|\uff1e", "<|im\uff3fend|>", "<|\u0131m_end|>", "<|im_end\u200b|>",
    "<\u00ads>", "<s\u0301>", "<\u017f>", "▁<s>", "▁</s>", "Ġ<s>", "<|im_end|></w>", "<0x3C>s>",
)  # fmt: skip
_AROUND = (
    "", " ", "\n", "\t", "\0", "\x01", "\u00a0", "\u3000", "\ud800", "\udfff", "\udb80\udc00", "<", ">", "|", "a", "A",
    "é", "1", "\u0301", "\u200b", "\u200d", "\ufeff", "\ufffd", "▁", "Ġ", "##", "\U000f0000", "\U00100000\U00100001",
    "你", "<unk>", "[UNK]", "</", "<|", "|>", "\u0338",
)  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    """Return the spellings, some behind other text, and mixtures: `count` of each."""
    chance = random.Random(seed)
    behind = [around + spelled for around, spelled in itertools.product(_AROUND, _SPELLINGS)]
    return [*_SPELLINGS, *chance.sample(behind, count), *(mixture(chance) for _ in range(count))]


def mixture(chance: random.Random) -> str:
    """Return some spellings, parts of them, and other text."""
    pieces = (*_AROUND, *_SPELLINGS, *_SPELLINGS)
    found = [chance.choice(pieces) for _ in range(chance.randint(1, 8))]
    return "".join(piece[: chance.randint(1, 99)] if chance.random() < 0.2 else piece for piece in found)


def write_kind(directory: Path, kind: str, declared: str, template: str = "written out") -> Path:
    """Write tokenizer.json and tokenizer_config.json of a kind."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(document(kind, declared)), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": _TEMPLATES[template]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def document(kind: str, declared: str) -> dict[str, Any]:
    """Return the tokenizer.json. Controls have the first ids, or the last if they are no pieces."""
    model_name, normalizer, pre_tokenizer, changes = KINDS[kind]
    model = _model(model_name)
    if "end_of_word_suffix" in changes:
        model = _with_suffix(model, changes["end_of_word_suffix"])
    model = {**model, **changes}
    pieces = declared in ("pieces", "pieces too", "special")
    model, ids = _with_controls(model, pieces=pieces)
    added = []
    if declared != "pieces":
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": "normalized" in declared}
        added = [
            {"id": ids[text], "content": text, "special": declared == "special", **flags}
            for text in CONTROLS
            if text != "<unk>" or declared == "special"
        ]
    if isinstance(normalizer, str):
        normalizer = {"type": "Precompiled", "precompiled_charsmap": _charsmap(normalizer)}
    decoder = _bytes() if model_name == "bytes" else None
    return {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda each: each["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _with_controls(model: dict[str, Any], *, pieces: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the model with the controls among its pieces, or with all ids but the unknown's left free."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        known = dict.fromkeys(piece for piece, _ in vocab)
        new = [text for text in CONTROLS if text not in known and (pieces or text == "<unk>")]
        vocab = [*vocab, *([text, -5.0] for text in new)]
        ids = {piece: index for index, (piece, _) in enumerate(vocab)}
        model = {**model, "vocab": vocab, "unk_id": ids["<unk>"]}
    else:
        vocab = dict(vocab)
        for text in CONTROLS:
            if pieces or text == "<unk>":
                vocab.setdefault(text, max(vocab.values()) + 1)
        ids = dict(vocab)
        model = {**model, "vocab": vocab, "unk_token": "<unk>"}
    for text in CONTROLS:
        ids.setdefault(text, max(ids.values()) + 1)
    return model, ids


def _with_suffix(model: dict[str, Any], suffix: str) -> dict[str, Any]:
    vocab = dict(model["vocab"])
    for piece in list(vocab):
        vocab.setdefault(piece + suffix, len(vocab))
    return {**model, "vocab": vocab, "merges": []}


@cache
def _model(name: str) -> dict[str, Any]:
    """Return the model section, learned from the corpus and from texts about control tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    corpus = [*NASTY, *(text * 3 for text in ("a < s > b", "< | im _ start | >", "im_start im_end s / |", "< / s >"))]
    settings: dict[str, Any] = {"vocab_size": 700, "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = sorted({char for text in (*CONTROLS, *(t.upper() for t in CONTROLS)) for char in text})
    match name:
        case "bytes":
            rust = Tokenizer(models.BPE())
            trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "pieces":
            rust = Tokenizer(models.BPE())
            trainer = trainers.BpeTrainer(initial_alphabet=letters, limit_alphabet=150, **settings)
            rust.pre_tokenizer = pre_tokenizers.Metaspace()
        case "unigram":
            rust = Tokenizer(models.Unigram())
            trainer = trainers.UnigramTrainer(
                unk_token="<unk>", special_tokens=["<unk>"], initial_alphabet=letters, **settings
            )
            rust.normalizer, rust.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        case "wordpiece":
            rust = Tokenizer(models.WordPiece(unk_token="<unk>"))
            trainer = trainers.WordPieceTrainer(special_tokens=["<unk>"], initial_alphabet=letters, **settings)
            rust.normalizer, rust.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
        case _:
            rust = Tokenizer(models.WordLevel(unk_token="<unk>"))
            trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], **settings)
            rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.train_from_iterator(corpus, trainer)
    model: dict[str, Any] = json.loads(rust.to_str())["model"]
    if name in ("pieces", "unigram"):
        held = {piece for piece, _ in model["vocab"]} if name == "unigram" else model["vocab"]
        for piece in (f"<0x{byte:02X}>" for byte in range(256)):
            if name == "unigram":
                model["vocab"].append([piece, -20.0])
            elif piece not in held:
                model["vocab"][piece] = len(model["vocab"])
        if name == "pieces":
            model.update(byte_fallback=True, fuse_unk=True)
    return model


@cache
def _charsmap(rule: str) -> str:
    """Return SentencePiece's own replacement table, as in every model that it trains."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(NASTY), model_writer=written, vocab_size=500, normalization_rule_name=rule,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(written.getvalue())
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
