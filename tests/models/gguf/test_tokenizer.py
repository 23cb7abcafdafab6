"""Converted tokenizers, against llama.cpp's recorded token ids."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.models.gguf.convert import _write_templates
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.pretokenizers import _BY_NAME, _SAME_AS
from headrace.models.gguf.tokenizer import build_tokenizer, tokenizer_config
from headrace.models.gguf.vocabulary import SpecialIds, read_vocabulary
from headrace.models.text.chat_template import ChatTemplate, read_sources
from headrace.models.text.control_tokens import TURN_ENDS
from headrace.models.text.vocabulary import USER_DEFINED
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.corpus import NASTY
from tests.support.gguf_models import VOCABULARIES

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("llama_cpp.json").read_text())
LLAMA_CPP: dict[str, Any] = RECORDED["tokens"]
SAME_TOKENS: dict[str, str] = RECORDED["same_tokens"]
CASES = [case for case in LLAMA_CPP if case != "default-model"]
# llama.cpp splits these models' words otherwise than their own tokenizers: by no case, and Kimi's before marks.
OWN_WORDS = {"kimi-k2", "tiny_aya", "cohere2moe", "youtu"}
# The recorded vocabulary does not tell these from others.
ALIKE = {"glm4", "jais-2", "minicpm5", "ufakzeka"}


def metadata(vocabulary: str, **changes: Any) -> Metadata:
    """The tokenizer metadata of a frozen vocabulary; `changes` are keys without `tokenizer.ggml.`, None removes."""
    stored = VOCABULARIES[vocabulary]
    values: dict[str, Any] = {"tokens": stored["tokens"], "token_type": stored["types"]}
    if vocabulary == "rwkv":
        values |= {"model": "rwkv", "bos_token_id": 0, "eos_token_id": 0}
    elif "merges" in stored:
        bos = int(vocabulary == "characters")
        values |= {"model": "gpt2", "pre": "smollm", "merges": stored["merges"], "bos_token_id": bos}
        values |= {"eos_token_id": bos + 1}
    else:
        values |= {"model": "llama", "scores": stored["scores"], "add_space_prefix": False}
    values |= changes
    keyed = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return Metadata({"general.architecture": "llama", **keyed})


def build(vocabulary: str, **changes: Any) -> tuple[Tokenizer, SpecialIds]:
    source = metadata(vocabulary, **changes)
    document, special = build_tokenizer(source, read_vocabulary(source))
    return Tokenizer.from_buffer(document), special


def vocabulary_of(case: str) -> str:
    if case == "sarvam-moe":
        return "characters"
    return "sentencepiece" if case.startswith("spm") else "byte_level"


def of_case(case: str) -> Tokenizer:
    if case.startswith("spm"):
        return build("sentencepiece", add_space_prefix=case == "spm-prefix")[0]
    return build(vocabulary_of(case), pre=case)[0]


def differences(tokenizer: Tokenizer, case: str) -> list[tuple[str, str]]:
    """(mode, text) wherever the ids are not llama.cpp's."""
    wrong = []
    for mode in ("special", "plain"):
        tokenizer.encode_special_tokens = mode == "plain"
        for text, ids in zip(NASTY, LLAMA_CPP[case][mode], strict=True):
            if tokenizer.encode(text).ids != ids:
                wrong.append((mode, text))
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_token_ids_are_llama_cpps(case: str) -> None:
    assert differences(of_case(case), case) == []


def test_tokens_are_sorted_so_that_the_library_reads_them_soonest() -> None:
    source = metadata("sentencepiece")
    document, _ = build_tokenizer(source, read_vocabulary(source))
    tokens = list(json.loads(document)["model"]["vocab"])
    assert tokens == sorted(tokens, key=str.encode)


def test_an_rwkv_vocabulary_gives_the_longest_token_at_each_place() -> None:
    tokenizer, special = build("rwkv", eot_token_id=4)
    stored = VOCABULARIES["rwkv"]
    kinds = zip(stored["tokens"], stored["types"], strict=True)
    ids = {
        ast.literal_eval(f"b'{text}'" if "'" not in text else f'b"{text}"'): i
        for i, (text, kind) in enumerate(kinds)
        if kind == 1
    }
    longest = max(map(len, ids))
    added = [token for token, kind in zip(stored["tokens"], stored["types"], strict=True) if kind == USER_DEFINED]
    for text in (text for text in NASTY if not any(token in text for token in added)):
        data = text.encode()
        wanted = []
        while data:
            size = max(size for size in range(1, longest + 1) if data[:size] in ids)
            wanted.append(ids[data[:size]])
            data = data[size:]
        tokenizer.encode_special_tokens = True
        assert tokenizer.encode(text).ids == wanted, text
        assert tokenizer.decode(wanted) == text
    assert special.ends[:2] == [0, 4]
    with pytest.raises(CheckpointError, match="some bytes are no tokens"):
        build("rwkv", tokens=stored["tokens"][:50], token_type=stored["types"][:50])
    with pytest.raises(CheckpointError, match="the same bytes"):
        build("rwkv", tokens=[*stored["tokens"], r"\x61"], token_type=[*stored["types"], 1])


def test_a_template_of_llama_cpp_is_known_by_its_name(tmp_path: Path) -> None:
    named = {"general.architecture": "rwkv7", "tokenizer.chat_template": "rwkv-world"}
    _write_templates(Metadata(named), tmp_path)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi "}]
    assert ChatTemplate(read_sources(tmp_path, {})).render(turns) == "System: Be brief.\n\nUser: hi\n\nAssistant:"


def test_every_pre_tokenizer_has_recorded_answers_that_tell_it_from_the_others() -> None:
    assert set(_BY_NAME) - OWN_WORDS | {"spm", "spm-prefix", "sarvam-moe", "default-model"} == set(LLAMA_CPP)
    answers = [json.dumps(LLAMA_CPP[case]) for case in LLAMA_CPP.keys() - ALIKE]
    assert len(set(answers)) == len(answers)
    assert SAME_TOKENS.keys() == _SAME_AS.keys() - OWN_WORDS


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),
        ("qwen2", "Ankara'da", ["Ankara", "'d", "a"]),
        ("jais-2", "x" + " " * 100, ["x", "Ġ" * 64, "Ġ" * 32, "Ġ" * 4]),
        ("minicpm5", "ab1234", ["ab", "123", "4"]),
        ("glm4", "ab1234 x", ["ab", "123", "4", "Ġx"]),
        ("tiny_aya", "XMLHttp don't1234567", ["XMLHttp", "Ġdon't", "1", "234", "567"]),
        ("tiny_aya", "camelCase", ["camel", "Case"]),
        ("youtu", "camelCase12", ["camel", "Case", "1", "2"]),
    ],
)
def test_texts_are_split_into_words_as_by_hand(pre: str, text: str, words: list[str]) -> None:
    split = of_case(pre).pre_tokenizer.pre_tokenize_str
    assert [word for word, _ in split(text)] == words


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "glm4", "glm5", "minicpm5", "youtu", "qwen2", "smaug-bpe"])
def test_whole_word_tokens_skip_merges_for_the_pretokenizers_of_llama_cpp(pre: str) -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    changes = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": ["b c"], "bos_token_id": None, "pre": pre}
    tokenizer, _ = build("byte_level", **changes, eos_token_id=None)
    assert tokenizer.encode("abc").tokens == (["a", "bc"] if pre in ("qwen2", "smaug-bpe") else ["abc"])


def test_kimis_pretokenizer_splits_as_its_pattern() -> None:
    split = of_case("kimi-k2").pre_tokenizer.pre_tokenize_str
    words = [text for text, _ in split("HttpRequest don't 我喜欢a1234 e\u0301")]
    assert words[:3] == ["Http", "Request", "Ġdon't"]
    assert [len(word) for word in words[3:]] == [1, 9, 1, 3, 1, 4]  # Han characters apart, the mark with its letter


@pytest.mark.parametrize("case", ["smollm", "llama-bpe", "qwen2", "spm", "spm-prefix"])
def test_decoding_gives_the_text_back(case: str) -> None:
    tokenizer = of_case(case)
    tokenizer.encode_special_tokens = True
    for text in NASTY:
        if case == "spm-prefix" and any(token in text for token in ("\n\n", "   ", "[INST]")):
            continue  # llama.cpp puts a space behind user-defined tokens, too
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
        assert decoded == (text.replace("\u2581", " ") if case.startswith("spm") else text)


@pytest.mark.parametrize("case", CASES)
def test_plain_text_never_becomes_a_control_token(case: str) -> None:
    tokenizer = of_case(case)
    tokenizer.encode_special_tokens = True
    types = VOCABULARIES[vocabulary_of(case)]["types"]
    for text in NASTY:
        assert all(types[index] != 3 for index in tokenizer.encode(text, add_special_tokens=False).ids)


def test_merges_cannot_build_a_byte_token() -> None:
    characters = [*"<0x41>b"]
    parts = ["<0", "<0x", "<0x4", "1>"]
    tokens = ["<unk>", *characters, *parts, "<0x41>"]
    kinds = [2, *[1] * (len(tokens) - 2), 6]
    merges = ["< 0", "<0 x", "<0x 4", "1 >", "<0x4 1>"]
    changes = {"model": "gemma4", "tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": None}
    tokenizer, _ = build("characters", **changes, eos_token_id=None, unknown_token_id=0)
    assert tokenizer.encode("b<0x41>").tokens == ["b", "<0x4", "1>"]


def test_merges_of_parts_with_a_space_are_pairs() -> None:
    """A text "left right" would be cut at the wrong space."""
    tokens = ["<unk>", *"q z", "q ", "q z"]
    kinds = [2, *[1] * (len(tokens) - 1)]
    source = metadata("sentencepiece", tokens=tokens, token_type=kinds, scores=[0.0] * len(tokens))
    document, _ = build_tokenizer(source, read_vocabulary(source))
    assert json.loads(document)["model"]["merges"] == [["q", " "], ["q ", "z"]]


def test_merges_cannot_build_a_control_token() -> None:
    stored = VOCABULARIES["byte_level"]
    tokens = [*stored["tokens"], "zq"]
    types = [*stored["types"], 3]
    tokenizer, _ = build("byte_level", tokens=tokens, token_type=types, merges=["z q", *stored["merges"]])
    tokenizer.encode_special_tokens = True
    assert len(tokens) - 1 not in tokenizer.encode("zq zq").ids
    tokenizer.encode_special_tokens = False
    assert len(tokens) - 1 in tokenizer.encode("zq").ids

    stored = VOCABULARIES["sentencepiece"]
    tokens = [*stored["tokens"], "zq"]
    types = [*stored["types"], 3]
    scores = [*stored["scores"], 0.0]
    tokenizer, _ = build("sentencepiece", tokens=tokens, token_type=types, scores=scores)
    tokenizer.encode_special_tokens = True
    assert len(tokens) - 1 not in tokenizer.encode("zq zq").ids


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    assert build("byte_level")[0].encode("a").ids[0] != 0
    assert build("byte_level", pre="llama-bpe")[0].encode("a").ids[0] == 0
    assert build("byte_level", pre="llama-bpe", add_bos_token=False)[0].encode("a").ids[0] != 0
    assert build("sentencepiece")[0].encode("a").ids[0] == 1
    both = build("byte_level", add_bos_token=True, add_eos_token=True)[0]
    assert both.encode("a").ids[:1] + both.encode("a").ids[-1:] == [0, 1]
    assert both.encode("a", add_special_tokens=False).ids == both.encode("a").ids[1:-1]
    assert both.encode("a", "b").ids == both.encode("a").ids + both.encode("b").ids
    assert build("byte_level", add_bos_token=True, bos_token_id=None)[1].add_bos is False


def test_all_ids_that_end_a_turn_are_known() -> None:
    assert build("byte_level")[1].ends == [1, 3]  # the declared </s>, then <|im_end|> by its name
    assert build("byte_level", eos_token_id=3)[1].ends == [3]
    assert build("byte_level", eot_token_id=7, eom_token_id=1)[1].ends == [1, 7, 3]
    assert build("byte_level", eos_token_id=None)[1].ends == [3]


def test_a_sentencepiece_file_may_omit_the_usual_ids() -> None:
    special = build("sentencepiece")[1]
    assert (special.unknown, special.bos, special.eos, special.pad) == (0, 1, 2, None)
    assert special.ends == [2]
    stated = build("sentencepiece", unknown_token_id=2, bos_token_id=0, eos_token_id=1)[1]
    assert (stated.unknown, stated.bos, stated.eos) == (2, 0, 1)
    omitted = build("byte_level", bos_token_id=None, eos_token_id=None)[1]
    assert (omitted.unknown, omitted.bos, omitted.eos) == (None, None, None)


@pytest.mark.parametrize("text", TURN_ENDS)
def test_every_turn_end_counts_by_its_name_if_it_is_a_control_token(text: str) -> None:
    stored = VOCABULARIES["byte_level"]
    tokens = [token for token in stored["tokens"] if token != text] + [text]
    kinds = stored["types"][: len(tokens) - 1]
    assert build("byte_level", tokens=tokens, token_type=[*kinds, 3])[1].ends[-1] == len(tokens) - 1
    assert len(tokens) - 1 not in build("byte_level", tokens=tokens, token_type=[*kinds, 1])[1].ends


def test_the_tokenizer_config_names_the_special_tokens() -> None:
    source = metadata("byte_level", padding_token_id=4)
    vocabulary = read_vocabulary(source)
    config = tokenizer_config(vocabulary, build_tokenizer(source, vocabulary)[1], 256)
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<s>", "</s>", 256)
    assert config["pad_token"] == vocabulary.tokens[4]
    assert "unk_token" not in config


def test_empty_tokens_get_a_name() -> None:
    stored = VOCABULARIES["byte_level"]
    source = metadata("byte_level", tokens=[*stored["tokens"], "", ""], token_type=[*stored["types"], 5, 5])
    assert read_vocabulary(source).tokens[-2:] == [f"[EMPTY_{len(stored['tokens']) + n}]" for n in (0, 1)]


@pytest.mark.parametrize(
    ("vocabulary", "changes", "message"),
    [
        ("byte_level", {"pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ("byte_level", {"model": "bert"}, "tokenizer 'bert' is not supported"),
        ("byte_level", {"merges": ["a b", "zz qqq"]}, "merge 'a b' names a token|merge 'zz qqq' names a token"),
        ("byte_level", {"merges": ["ab"]}, "merge 'ab' names a token"),
        ("byte_level", {"merges": None}, "lacks tokenizer.ggml.merges"),
        ("byte_level", {"tokens": ["a", "b", "a"], "token_type": None}, "appears twice"),
        ("byte_level", {"tokens": []}, "vocabulary is empty"),
        ("byte_level", {"tokens": [1, 2]}, "should be a list of texts"),
        ("byte_level", {"token_type": [1]}, "should be a list of 1001 whole numbers"),
        ("byte_level", {"bos_token_id": 99999}, "bos_token_id should be a whole number from 0 to 1000"),
        ("byte_level", {"add_bos_token": 1}, "should be true or false"),
        ("sentencepiece", {"scores": [0.0]}, "should be a list of 903 numbers"),
        ("sentencepiece", {"scores": [float("nan")] * 903}, "finite numbers"),
        ("sentencepiece", {"scores": None}, "lacks tokenizer.ggml.scores"),
    ],
)
def test_broken_and_foreign_tokenizers_are_refused(vocabulary: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(vocabulary, **changes)
    assert isinstance(caught.value, UnsupportedModelError) == ("not supported" in message)


@pytest.mark.real
def test_the_default_models_token_ids_are_llama_cpps(default_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_directory / "tokenizer.json"))
    assert differences(tokenizer, "default-model") == []
