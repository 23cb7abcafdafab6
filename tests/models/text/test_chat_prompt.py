"""Prompts with the beginning of an answer, and thinking that the template opens itself."""

from pathlib import Path

import pytest

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.tokenizer import Tokenizer
from tests.families import FAMILIES, write_family

ASK = [{"role": "user", "content": "What is <think> for?"}]


def tokenizer(directory: Path, family: str, opens: bool = False) -> Tokenizer:
    write_family(directory / family, family)
    if opens:
        template = directory / family / "chat_template.jinja"
        template.write_text(template.read_text() + "{% if add_generation_prompt %}{{- '<think>\\n' }}{% endif %}")
    return Tokenizer.load(directory / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_answer_follows_the_prompt(tmp_path: Path, family: str) -> None:
    encoder = tokenizer(tmp_path, family)
    prompts = ChatPrompt(encoder)
    prompt = prompts.encode(ASK)
    text = "It marks thinking. <|im_end|> It"
    continued = prompts.encode(ASK, text)
    assert prompt == encoder.encode_chat(ASK)
    assert continued[: len(prompt)] == prompt
    assert encoder.decode(continued[len(prompt) :], skip_special=False).strip() == text
    assert encoder.eos_ids.isdisjoint(continued[len(prompt) :])  # the answer's text ends no turn


def test_tags_of_a_continued_answer_are_the_models_own(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    prompts = ChatPrompt(encoder)
    assert prompts.thinks
    tags = encoder.encode("<think></think>", special=True)
    continued = prompts.encode(ASK, "<think>\nhm\n</think>\n\nFor")[len(prompts.encode(ASK)) :]
    assert [token for token in continued if token in tags] == tags
    assert prompts.opening(prompts.encode(ASK)) == ""


def test_an_opening_tag_that_the_template_writes_belongs_to_the_answer(tmp_path: Path) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, "qwen3", opens=True))
    prompt = prompts.encode(ASK)
    assert prompts.opening(prompt) == "<think>\n"
    assert prompts.encode(ASK, "<think>\n") == prompt  # not written twice
    longer = prompts.encode(ASK, "<think>\nhm")
    assert longer[: len(prompt)] == prompt
    assert len(longer) > len(prompt)


def test_a_template_gets_enable_thinking(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    prompts = ChatPrompt(encoder)
    asked = prompts.encode(ASK)
    assert prompts.encode(ASK, thinking=True) == asked
    told = prompts.encode(ASK, thinking=False)
    assert told == asked + encoder.encode("<think>\n\n</think>\n\n", special=True)
    assert prompts.encode(ASK, "It is", thinking=False) == told + encoder.encode("It is")
    assert prompts.opening(told) == ""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3"}))
def test_a_template_that_does_not_ask_is_not_disturbed(tmp_path: Path, family: str) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, family))
    assert prompts.encode(ASK, thinking=False) == prompts.encode(ASK, thinking=True) == prompts.encode(ASK)


def test_models_that_do_not_think(tmp_path: Path) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, "chatml"))
    assert not prompts.thinks
    assert prompts.opening(prompts.encode([{"role": "user", "content": "<think>"}])) == ""
