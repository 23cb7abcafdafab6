"""Thinking in control tokens becomes a `<think>` section, and is converted back."""

import json
from pathlib import Path

import pytest

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.thinking import read_tags
from headrace.models.text.tokenizer import Tokenizer
from tests.support.tiny_chat import write_byte_tokenizer

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
MUSE = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"]
MUSE_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %} to=user{% endif %}"
    "<|message|>{{ m.content }}<|eot|>{% endfor %}<|start|>assistant"
)
FAMILIES = {
    "harmony": (HARMONY, HARMONY_TEMPLATE, "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "muse": (MUSE, MUSE_TEMPLATE, " to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    "mistral": (["[THINK]", "[/THINK]"], "{% for m in messages %}{{ m.content }}{% endfor %}", "[THINK]", "[/THINK]"),
    "gemma": (["<|channel>", "<channel|>"], "{{ messages[-1].content }}", "<|channel>thought\n", "\n<channel|>"),
    "minimax": (["<mm:think>", "</mm:think>"], "{{ messages[-1].content }}", "<mm:think>", "</mm:think>"),
    "seed": (["<seed:think>", "</seed:think>"], "{{ messages[-1].content }}", "<seed:think>", "</seed:think>"),
}  # fmt: skip


def tokenizer(directory: Path, family: str, **generation: object) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

    directory.mkdir(exist_ok=True)
    write_byte_tokenizer(directory)
    controls, template, _, _ = FAMILIES[family]
    rust = RustTokenizer.from_file(str(directory / "tokenizer.json"))
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    rust.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": controls[-1]} if "|" in controls[0] else {})
    )
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return Tokenizer.load(directory)


def said(tokenizer: Tokenizer, text: str) -> str:
    stream = tokenizer.answer_stream()
    return "".join(map(stream.add, tokenizer.encode(text, special=True))) + stream.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_thinking_becomes_a_section(tmp_path: Path, family: str) -> None:
    _, _, opening, closing = FAMILIES[family]
    text = said(tokenizer(tmp_path, family), f"{opening}Two and two.{closing}Four.")
    assert text.replace("\n\n</think>", "\n</think>") == "<think>\nTwo and two.\n</think>\n\nFour."
    assert read_tags(text).thinking == "Two and two."


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_without_thinking_stays_plain(tmp_path: Path, family: str) -> None:
    _, _, _, closing = FAMILIES[family]
    straight = f"<|channel|>final{closing.rpartition('final')[2]}Four." if family == "harmony" else "Four."
    assert said(tokenizer(tmp_path, family), straight) == "Four."


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_continues_in_the_models_form(tmp_path: Path, family: str) -> None:
    _, _, opening, closing = FAMILIES[family]
    ours = tokenizer(tmp_path, family)
    asked = [{"role": "user", "content": "2+2?"}]
    start = ChatPrompt(ours).encode(asked)
    rest = ChatPrompt(ours).encode(asked, read_tags("<think>\nHm.\n</think>\n\nFo"))[len(start) :]
    assert ours.decode(rest, skip_special=False) == f"{opening}Hm.{closing}Fo"
    assert (
        ours.decode(ChatPrompt(ours).encode(asked, read_tags("<think>\nHm"))[len(start) :], skip_special=False)
        == f"{opening}Hm"
    )


def test_past_thinking_is_not_in_the_content(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."},
        {"role": "user", "content": "Sure?"},
    ]
    ours = tokenizer(tmp_path, "harmony")
    prompt = ours.decode(ChatPrompt(ours).encode(turns), skip_special=False)
    assert "<|channel|>final<|message|>Four.<|end|>" in prompt
    assert "Hm" not in prompt


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": [264]}])
def test_the_end_of_a_channel_ends_no_turn(tmp_path: Path, generation: dict[str, object]) -> None:
    ours = tokenizer(tmp_path, "harmony", **generation)
    (end,) = ours.encode("<|end|>", special=True)
    (final,) = ours.encode("<|return|>", special=True)
    assert end not in ours.eos_ids
    assert final in ours.eos_ids


def test_turn_ends_by_convention_only_where_none_is_declared(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).eos_ids == {258}  # <|im_end|>, which the template writes
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    assert Tokenizer.load(tmp_path).eos_ids == {256}


@pytest.mark.parametrize("family", ["mistral", "gemma", "seed"])
def test_thinking_that_the_prompt_begins_is_a_section(tmp_path: Path, family: str) -> None:
    _, template, opening, closing = FAMILIES[family]
    found = tokenizer(tmp_path, family)
    (tmp_path / "chat_template.jinja").write_text(template + opening)
    begun = Tokenizer.load(tmp_path)
    prompts = ChatPrompt(begun)
    prompt = prompts.encode([{"role": "user", "content": "2 + 2"}])
    assert prompts.opening(prompt) == "<think>\n"
    assert ChatPrompt(found).opening(ChatPrompt(found).encode([{"role": "user", "content": "2 + 2"}])) == ""

    stream = begun.answer_stream(thinks=True)
    ids = begun.encode(f"Two and two.{closing}Four.", special=True)
    text = prompts.opening(prompt) + "".join(map(stream.add, ids)) + stream.finish()
    assert read_tags(text).thinking == "Two and two."
    assert read_tags(text).content == "Four."
    go_on = prompts.encode([{"role": "user", "content": "2 + 2"}], read_tags("<think>\nTwo and"))
    assert begun.decode(go_on[len(prompt) :], skip_special=False) == "Two and"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_section_is_left_out(tmp_path: Path, family: str) -> None:
    _, _, opening, closing = FAMILIES[family]
    assert said(tokenizer(tmp_path, family), f"{opening}\n{closing}Four.") == "Four."


@pytest.mark.parametrize("family", ["harmony", "muse"])
def test_a_continued_answer_has_the_head_of_its_message(tmp_path: Path, family: str) -> None:
    model = tokenizer(tmp_path, family)
    prompt = ChatPrompt(model).encode([{"role": "user", "content": "x"}], read_tags("So"))
    head = FAMILIES[family][3].partition("assistant")[2]
    assert model.decode(prompt, skip_special=False).endswith(f"<|start|>assistant{head}So")
