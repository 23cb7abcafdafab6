"""Tokenizers of checkpoint directories, and their plain encodings."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from tests.support.corpus import NASTY
from tests.support.families import FAMILIES, write_family


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a family, then change its JSON files: write("chatml", config={"eos_token_id": 1})."""

    def _write(family: str, **changes: dict[str, Any]) -> Path:
        directory = write_family(tmp_path / family, family)
        for name, change in changes.items():
            file = directory / f"{name}.json"
            document = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**document, **change}))
        return directory

    return _write


def id_of(tokenizer: Tokenizer, text: str) -> int:
    (token_id,) = tokenizer.encode(text, special=True)
    return token_id


def test_all_declared_ends_of_turn_count(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("chatml", generation_config={"eos_token_id": [0, 7]}, config={"eos_token_id": 2}))
    assert tokenizer.eos_ids == {0, 2, 7}


def test_a_turn_end_that_the_template_writes_counts_though_nothing_declares_it(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("llama3"))
    assert tokenizer.eos_ids == {id_of(tokenizer, "<|end_of_text|>"), id_of(tokenizer, "<|eot_id|>")}


def test_an_end_of_text_that_the_template_writes_ends_a_turn(write: Callable[..., Path]) -> None:
    directory = write("chatml")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}<|endoftext|>")
    assert 0 in Tokenizer.load(directory).eos_ids


def test_a_turn_end_that_the_template_never_writes_does_not_count(write: Callable[..., Path]) -> None:
    directory = write("chatml", config={"eos_token_id": 0}, tokenizer_config={"eos_token": "<|endoftext|>"})
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.load(directory).eos_ids == {0}


def test_ends_of_turn_of_a_nested_text_config(write: Callable[..., Path]) -> None:
    directory = write("chatml", config={"eos_token_id": None, "text_config": {"eos_token_id": [1]}})
    assert Tokenizer.load(directory).eos_ids == {1, 2}


def test_eos_id_outside_the_vocabulary_is_left_out(write: Callable[..., Path]) -> None:
    assert Tokenizer.load(write("chatml", generation_config={"eos_token_id": [-1, 10**9]})).eos_ids == {2}


@pytest.mark.parametrize("eos", ["2", 2.5, [[2]], True])
def test_eos_id_that_is_no_id_is_refused(write: Callable[..., Path], eos: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(write("chatml", config={"eos_token_id": eos}))


def test_bos_goes_before_a_raw_prompt(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("llama3"))
    bos = id_of(tokenizer, "<|begin_of_text|>")
    assert tokenizer.encode_prompt("hello") == [bos, *tokenizer.encode("hello")]


def test_typed_bos_in_a_raw_prompt_is_text(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("llama3"))
    bos = id_of(tokenizer, "<|begin_of_text|>")
    assert tokenizer.encode_prompt("<|begin_of_text|>hello").count(bos) == 1


def test_add_bos_token_overrules_the_post_processor(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("llama3", tokenizer_config={"add_bos_token": False}))
    assert tokenizer.encode_prompt("hello") == tokenizer.encode("hello")


def test_models_without_bos_get_none(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("qwen3"))
    assert tokenizer.encode_prompt("hello") == tokenizer.encode("hello")


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_control_tokens_are_text(family: str, write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write(family))
    for text in FAMILIES[family].special:
        plain = tokenizer.encode(f"say {text} twice: {text}{text}")
        assert id_of(tokenizer, text) not in plain
        assert tokenizer.decode(plain).lstrip(" ") == f"say {text} twice: {text}{text}"


def test_control_text_is_plain_even_where_the_model_itself_could_merge_it(write: Callable[..., Path]) -> None:
    directory = write("gemma3")
    document = json.loads((directory / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    merges = document["model"]["merges"]
    text = "<eos>"
    for end in range(2, len(text)):
        vocab.setdefault(text[:end], len(vocab))
    for char in text:
        vocab.setdefault(char, len(vocab))
    document["model"]["merges"] = [[text[:end], text[end]] for end in range(1, len(text))] + merges
    for added in document["added_tokens"]:
        if added["id"] >= len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]):
            added["id"] += len(vocab)
    (directory / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.load(directory)
    assert vocab[text] not in tokenizer.encode("an <eos> here")


@pytest.mark.parametrize("family", ["chatml", "gemma3"])
def test_lone_surrogates_become_replacement_characters(family: str, write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write(family))
    assert tokenizer.encode("a\udc80b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode_chat([{"role": "user", "content": "a\udc80b"}]) == tokenizer.encode_chat(
        [{"role": "user", "content": "a\ufffdb"}]
    )


def test_threads_share_a_tokenizer(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("chatml"))

    def encode_all(_: int) -> list[list[int]]:
        return [tokenizer.encode(text, special=special) for text in NASTY for special in (False, True)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(encode_all, range(8)))
    assert all(result == encode_all(0) for result in results)


def test_a_directory_without_tokenizer_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_broken_files_are_named_in_one_line(write: Callable[..., Path], file: str, content: bytes) -> None:
    directory = write("chatml")
    (directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file) as caught:
        Tokenizer.load(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("alone", [b"\\ud800", b"\\uDFFF", b"\xed\xa0\x80"])
def test_a_lone_surrogate_in_a_file_is_named(write: Callable[..., Path], file: str, alone: bytes) -> None:
    directory = write("chatml")
    (directory / "chat_template.jinja").unlink()
    (directory / file).write_bytes(b'{"bos_token": "%b", "chat_template": "%b"}' % (alone, alone))
    with pytest.raises(CheckpointError, match=file):
        Tokenizer.load(directory)


def test_pairs_of_surrogates_are_text(write: Callable[..., Path]) -> None:
    directory = write("chatml")
    (directory / "tokenizer_config.json").write_bytes(b'{"comment": "\\ud83d\\ude00 \\\\ud800"}')
    Tokenizer.load(directory)


def test_without_a_template_a_chat_is_refused(write: Callable[..., Path]) -> None:
    directory = write("chatml")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer.load(directory).encode_chat([{"role": "user", "content": "hi"}])


def test_marked_tokens_are_grouped_into_text_and_control_parts(write: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(write("chatml"))
    end = id_of(tokenizer, "<|im_end|>")
    ids = [*tokenizer.encode("two words"), end, end, *tokenizer.encode("€"), end]
    parts = [("two words", False), ("<|im_end|><|im_end|>", True), ("€", False), ("<|im_end|>", True)]
    assert tokenizer.marked(ids) == parts
    assert tokenizer.marked([]) == []
