"""Tokenizers without a tokenizer.json: SentencePiece against its own library, byte ranks against their definition."""

import base64
import io
import json
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from headrace.models.text import other_formats
from headrace.models.text.detokenizer import byte_alphabet
from headrace.models.text.longest_match import longest_match
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import USER_DEFINED
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.corpus import NASTY

WORDS = ["the", "he", "in", "er", " the", "inn", "inner", " é", "你", "你好", "\n\n", "12", " =="]
RANKS = {bytes([byte]): byte for byte in range(256)}
for _word in WORDS:
    for _end in range(2, len(_word.encode()) + 1):
        RANKS.setdefault(_word.encode()[:_end], len(RANKS))
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [*NASTY, "the inner é 你好 你", "THE Inner's 1234\n\n\n  == they're", "東京タワー the Straße"]
LINES = [line for text in NASTY for line in text.splitlines() if line.strip() and "\0" not in line]


def merged(pattern: str, text: str, offset: int) -> list[int]:
    """tiktoken's definition: in each word, the neighbours whose union has the lowest rank merge first."""
    ids: list[int] = []
    for word in regex.findall(pattern, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in word.encode()] if word.encode() not in RANKS else [word.encode()]
        while len(parts) > 1:
            unions = [RANKS.get(a + b, len(RANKS)) for a, b in pairwise(parts)]
            best = min(range(len(unions)), key=unions.__getitem__)
            if unions[best] == len(RANKS):
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [RANKS[part] + offset for part in parts]
    return ids


def tekken(directory: Path, **changes: Any) -> Path:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for token, i in RANKS.items()]
    extra = {"rank": len(RANKS), "token_bytes": base64.b64encode(b"left out").decode()}
    config = {"pattern": TEKKEN, "default_vocab_size": len(RANKS) + 24, "default_num_special_tokens": 24}
    content = {"config": config, "vocab": [*vocab, extra], **changes}
    (directory / "tekken.json").write_text(json.dumps(content))
    return directory


def tiktoken(directory: Path, file: str, config: Mapping[str, Any]) -> Path:
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()]
    (directory / file).write_bytes(b"".join(lines))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_tekken_tokenizer_has_the_ids_of_its_merges(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tekken(tmp_path))
    for text in TEXTS:
        assert tokenizer.encode(text) == merged(TEKKEN, text, 24), text
        assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "replace").decode()
    assert tokenizer.encode_prompt("the") == [1, *tokenizer.encode("the")]
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("[INST]<SPECIAL_23>", special=True) == [3, 23]
    assert tokenizer.encode("[INST]") != [3]  # what people type is text
    assert tokenizer.vocab_size == len(RANKS) + 24


@pytest.mark.parametrize(
    ("file", "name", "pattern"),
    [("tiktoken.model", "TikTokenTokenizer", KIMI), ("qwen.tiktoken", "QWenTokenizer", QWEN)],
)
def test_a_tiktoken_tokenizer_has_the_ids_of_its_merges(tmp_path: Path, file: str, name: str, pattern: str) -> None:
    end = len(RANKS) + 2
    config = {"tokenizer_class": name, "eos_token": "<|im_end|>"}
    if name != "QWenTokenizer":
        config["added_tokens_decoder"] = {str(end): {"content": "<|im_end|>", "special": True}}
    tokenizer = Tokenizer.load(tiktoken(tmp_path, file, config))
    for text in TEXTS:
        if "<|" not in text:
            composed = unicodedata.normalize("NFC", text) if name == "QWenTokenizer" else text
            assert tokenizer.encode(text) == merged(pattern, composed, 0), text
    assert tokenizer.eos_ids == {end}
    assert tokenizer.encode("<|im_end|>", special=True) == [end]


WORLD = {token: i for i, token in enumerate([*RANKS, b"\xe2\x80", b" \xe4", b"\n\xe6", b"it's", b'"\\'], start=1)}


def world(directory: Path) -> Path:
    """Write a vocabulary as RWKV's."""
    lines = []
    for token, index in WORLD.items():
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{index} {literal} {len(token)}")
    (directory / "rwkv_vocab_v20230424.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def longest(text: str) -> list[int]:
    """Return the ids by definition: the longest token at each place."""
    data = text.encode()
    ids = []
    while data:
        size = max(size for size in range(1, 1 + max(map(len, WORLD))) if data[:size] in WORLD)
        ids.append(WORLD[data[:size]])
        data = data[size:]
    return ids


def test_an_rwkv_vocabulary_gives_the_longest_token_at_each_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(world(tmp_path))
    for text in (*TEXTS, "it's \u201cso\u201d \u4f60 \n\u6211 '\"\\"):
        whole = text.encode("utf-8", "replace").decode()
        assert tokenizer.encode(text) == longest(whole), text
        assert tokenizer.decode(tokenizer.encode(text)) == whole
    assert tokenizer.encode("<|rwkv_tokenizer_end_of_text|>", special=True) == [0]
    assert tokenizer.encode("<|rwkv_tokenizer_end_of_text|>") == longest("<|rwkv_tokenizer_end_of_text|>")
    assert tokenizer.vocab_size == len(WORLD) + 1
    config = {"added_tokens_decoder": {"0": {"content": "<end>"}, "400": {"content": "<x>"}}, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = Tokenizer.load(tmp_path)
    assert named.encode("<end><x>", special=True) == [0, 400]
    assert named.eos_ids == {0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("300 'ab' 3", "has 2 bytes"),
        ("300 ab 2", "is no token"),
        ("300 '\\x' 1", "is no text"),
        ("300 [1] 1", "is no token"),
        ("1 'a new one' 9", "same text or number"),
        (f"300 {'x' * 300!r} 300", "300 bytes"),
        ("0 'a new one' 9", "the number of another"),
    ],
)
def test_broken_rwkv_vocabularies_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = world(tmp_path) / "rwkv_vocab_v20230424.txt"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_an_rwkv_vocabulary_without_a_byte_is_refused(tmp_path: Path) -> None:
    file = world(tmp_path) / "rwkv_vocab_v20230424.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(line for line in lines if repr(b"\xff") not in line), encoding="utf-8")
    with pytest.raises(CheckpointError, match="some bytes are no tokens"):
        Tokenizer.load(tmp_path)


def test_an_rwkv_vocabulary_of_too_many_tokens_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    file = world(tmp_path) / "rwkv_vocab_v20230424.txt"
    with file.open("a", encoding="utf-8") as stream:
        stream.write("no token\n" * (1 << 17))
    with pytest.raises(CheckpointError, match="more than 131072 tokens"):
        Tokenizer.load(tmp_path)


def test_an_rwkv_vocabulary_with_too_many_bytes_of_control_tokens_is_refused(tmp_path: Path) -> None:
    added = {str(1000 + index): {"content": f"<{index:>1000}>"} for index in range(1100)}
    (world(tmp_path) / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match="added tokens have more than 1048576 bytes"):
        Tokenizer.load(tmp_path)


def test_longest_match_refuses_too_many_tokens() -> None:
    tokens = {*byte_alphabet(), *(f"{index:x}" for index in range(1 << 17))}
    with pytest.raises(CheckpointError, match="more than 131072 tokens"):
        longest_match(tokens)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").splitlines()
    (directory / "corpus.txt").write_text("\n".join([*LINES, *readme]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"), model_prefix=str(directory / "tokenizer"), model_type=request.param,
        vocab_size=600, byte_fallback=True, character_coverage=0.99, control_symbols=["[INST]"], minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, num_threads=1,
    )  # fmt: skip
    return directory


def test_a_sentencepiece_tokenizer_has_the_ids_of_the_library(model: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    tokenizer = Tokenizer.load(model)
    for text in TEXTS:
        if not any(mark in text for mark in ("<s>", "</s>", "[INST]", "<unk>", "\0", "\ud800", "▁")):
            assert tokenizer.encode(text) == theirs.encode(text), text
            assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text)), text
    assert tokenizer.encode_prompt("hi") == [1, *theirs.encode("hi")]
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size == theirs.vocab_size()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_that_removes_spaces_keeps_lines(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(model_type=kind, remove_extra_whitespaces=True))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in (
        "\n",
        "\n a \n",
        "  two  spaces  ",
        "\t a\t",
        " \n ",
        "line\n\n",
        "a" + " " * 101 + "b",
        "<0x0A> <0xFF>",
    ):
        assert tokenizer.encode(text) == theirs.encode(text), text


def test_a_sentencepiece_with_spaces_after_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(treat_whitespace_as_suffix=True))
    with pytest.raises(UnsupportedModelError, match="spaces after"):
        Tokenizer.load(tmp_path)


def test_names_of_bytes_are_text_to_a_sentencepiece_without_their_characters(tmp_path: Path) -> None:
    lines = [f"{word} <04 {word[::-1]} 1>" for word in ("alpha", "beta", "gamma", "delta")]
    (tmp_path / "tokenizer.model").write_bytes(trained(lines, model_type="unigram"))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("<0x41>", "alpha <0x0A><0xFF> beta", "<<0x04>>", "<0xFF", "0x41>"):
        assert tokenizer.encode(text) == theirs.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_across_the_names_of_bytes_are_those_of_sentencepiece(tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(trained(["a b <0x 123456789 ABCDEF>"], model_type="unigram"))
    model.pieces.add(piece="\u2581<0", score=-1.0)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("a <0x41>", "<0x41> <0x0A>", "a<0xFF"):
        assert tokenizer.encode(text) == theirs.encode(text), text
    assert len(model.pieces) - 1 in tokenizer.encode("a <0x41>")


def trained(lines: Iterable[str] = LINES, **options: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=700, hard_vocab_limit=False, minloglevel=2,
        byte_fallback=True, normalization_rule_name="identity", num_threads=1, **options,
    )  # fmt: skip
    return written.getvalue()


def test_tokens_beyond_a_sentencepiece_vocabulary_have_their_own_ids(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((model / "tokenizer.model").read_bytes())
    added = {"600": {"content": "<|end|>", "special": True}, "601": {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "<|end|>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|user|><|end|>", special=True) == [601, 600]
    assert tokenizer.eos_ids == {600}
    del added["600"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match=r"<\|user\|>.*601"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("place", ["vocabulary", "configuration"])
def test_a_sentencepiece_with_too_many_bytes_of_added_tokens_is_refused(tmp_path: Path, place: str) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(trained())
    texts = [f"<{index:>1000}>" for index in range(1100)]
    added = {}
    if place == "vocabulary":
        for text in texts:
            model.pieces.add(piece=text, type=USER_DEFINED)
    else:
        added = {str(len(model.pieces) + index): {"content": text} for index, text in enumerate(texts)}
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match="added tokens have more than 1048576 bytes"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_with_too_many_user_defined_pieces_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(trained())
    for index in range((1 << 17) + 1):
        model.pieces.add(piece=f"<{index:x}", type=USER_DEFINED)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="more than 131072 added tokens"):
        Tokenizer.load(tmp_path)


def test_tokens_beyond_a_vocabulary_are_added_at_once() -> None:
    """The library makes a table of all tokens for each call: hundred thousand calls would take hours."""
    calls: list[list[Any]] = []
    library = SimpleNamespace(add_tokens=calls.append, token_to_id=lambda text: int(text.strip("<>")))
    added = {index: {"content": f"<{index}>", "special": index % 2 == 0} for index in range(600, 700)}
    other_formats._add(cast(Any, library), added, Path("tokenizer.model"))
    [tokens] = calls
    assert [token.special for token in tokens] == [True, False] * 50


def test_a_number_that_is_no_digit_names_no_token(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((model / "tokenizer.model").read_bytes())
    added = {"600": {"content": "<|end|>", "special": True}, "\u00b2": {"content": "no number"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert Tokenizer.load(tmp_path).encode("<|end|>", special=True) == [600]


def test_unreadable_tokenizers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "tekken.json" in str(caught.value.hint)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xfe nothing of the kind")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        Tokenizer.load(tmp_path)
    tiktoken(tmp_path, "tokenizer.model", {"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(UnsupportedModelError, match="LlamaTokenizer"):
        Tokenizer.load(tmp_path)
    tiktoken(tmp_path, "tokenizer.model", {"tokenizer_class": "TikTokenTokenizer"})
    with pytest.raises(UnsupportedModelError, match="control tokens"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("rank", [10**9, 10**30, 10**4299])
def test_a_rank_that_would_take_gigabytes_is_refused(tmp_path: Path, rank: int) -> None:
    config = {"tokenizer_class": "QWenTokenizer"}
    file = tiktoken(tmp_path, "qwen.tiktoken", config) / "qwen.tiktoken"
    file.write_bytes(file.read_bytes() + b"%s %d\n" % (base64.b64encode(b"beyond"), rank))
    with pytest.raises(CheckpointError, match="id"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": {"a": 1}},
        {"tokenizer_class": ["TikTokenTokenizer"]},
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"999999999": {"content": "<s>"}}},
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"9" * 30: {"content": "<s>"}}},
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"600": 5}},
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"16000000": {"content": "<s>"}}},
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"\u00b2": 5, "600": 5}},
    ],
)
def test_a_tiktoken_config_of_another_shape_is_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tiktoken(tmp_path, "x.tiktoken", config))
    assert "\n" not in str(caught.value)


def test_a_sentencepiece_token_that_is_no_text_is_refused(model: Path, tmp_path: Path) -> None:
    content = (model / "tokenizer.model").read_bytes()
    place = content.index(b"</s>")
    (tmp_path / "tokenizer.model").write_bytes(content[:place] + b"<\xff\xfe>" + content[place + 4 :])
    with pytest.raises(CheckpointError, match=r"no text|neither"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": None}, {"config": {"pattern": "(", "default_vocab_size": 300, "default_num_special_tokens": 20}},
        {"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"vocab": [{"rank": 0, "token_bytes": "AA=="}]}, {"special_tokens": [{"rank": 0, "token_str": ""}]},
        {"config": {"pattern": TEKKEN, "default_vocab_size": 3, "default_num_special_tokens": 30}},
        {"config": {"pattern": TEKKEN, "default_vocab_size": 10**9, "default_num_special_tokens": 10**8}},
        {"special_tokens": [{"rank": [], "token_str": "<s>"}, {"rank": 0}]},
    ],
)  # fmt: skip
def test_a_broken_tekken_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tekken\.json") as caught:
        Tokenizer.load(tekken(tmp_path, **change))
    assert "\n" not in str(caught.value)


def test_without_the_package_the_hint_names_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(UnsupportedModelError, match="sentencepiece") as caught:
        Tokenizer.load(model)
    assert "headrace[tokenizers]" in str(caught.value.hint)
