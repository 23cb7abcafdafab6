"""Prompts for a gap: the tokens of a family around prefix and suffix, in its order."""

from pathlib import Path

import pytest

from headrace.models.text.chat_prompt import ChatPrompt, fill_in_middle
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError
from tests.support.tiny_chat import write_byte_tokenizer


def tokenizer(directory: Path, *added: str) -> Tokenizer:
    write_byte_tokenizer(directory, *added)
    return Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], [260, "a", 262, "b", 261]),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], [260, "a", 262, "b", 261]),
        (["[PREFIX]", "[SUFFIX]"], [261, "b", 260, "a"]),
    ],
)
def test_fill_in_middle_prompts_have_the_order_of_each_family(
    tmp_path: Path, tokens: list[str], expected: list[int | str]
) -> None:
    found = tokenizer(tmp_path, *tokens)
    ids = [one for part in expected for one in ([part] if isinstance(part, int) else found.encode(part))]
    assert fill_in_middle(found, "a", "b") == ids
    assert ChatPrompt(found).continued("a", "b") == ids


def test_text_never_becomes_a_fill_in_middle_token(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    ids = fill_in_middle(found, "<|fim_middle|>", "<|fim_suffix|>")
    assert [ids.count(token) for token in (260, 261, 262)] == [1, 1, 1]


def test_models_without_fill_in_middle_tokens_are_refused(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    with pytest.raises(UsageError, match="suffix"):
        fill_in_middle(found, "a", "b")
    assert ChatPrompt(found).continued("a") == found.encode("a")


def test_the_tokens_of_a_gap_in_a_text_are_tokens(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>", "<|other|>")
    text = "<|file_sep|>x.py\na<|other|><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    ids = found.encode("x.py\na<|other|>")
    assert ChatPrompt(found).continued(text) == [263, *ids, 260, *found.encode("a"), 262, *found.encode("b"), 261]
    assert 264 not in ids
    for other in ("<|fim_prefix|>a<|fim_suffix|>", "<|file_sep|>", "<fim_prefix>a<fim_suffix>b<fim_middle>"):
        assert ChatPrompt(found).continued(other) == found.encode(other)
